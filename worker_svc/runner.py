"""Executes step plans on one replica: applies the plan's deltas to the rows, runs the model, samples, ends rows.

The order of effects is the protocol's: releases, admissions, appended blocks, block copies, compute. Knows rows, model
and kernels; no sockets. Raises PlanError for a plan that disagrees with the rows; the caller then drops
them all (`reset`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.api import Backend, KVCache, Samples, SamplingBatch
from octavo.internal.v1 import types_pb2, worker_pb2
from worker_svc.batch import build_step_input
from worker_svc.grammar import GrammarCompiler
from worker_svc.model.decoder import Decoder
from worker_svc.outcome import Addresses, PromptStretch, SampledRows, StepOutcome, TokenLogprobs
from worker_svc.output_head import OutputHead
from worker_svc.parallel.group import ALONE, TPGroup
from worker_svc.prompt_logprobs import WantedPrompt, compute_prompt_logprobs, cut_logprobs, wanted_prompt
from worker_svc.rows import Int64Array, PlanError, RowLimits, RowState, RowTable
from worker_svc.sampling import SamplingTable


@dataclass(frozen=True)
class RunnerLimits:
    """What Hello promises of one step, beside the rows' own limits."""

    rows: RowLimits
    max_step_tokens: int


class Runner:
    """One replica's rows and the model that advances them. Used by one thread.

    Of a tensor-parallel group each rank has one, which runs the same plans in the same order and keeps equal rows; rank
    0's outcomes are the replica's.
    """

    def __init__(
        self,
        decoder: Decoder,
        backend: Backend,
        cache: KVCache,
        limits: RunnerLimits,
        host_cache: KVCache | None = None,
        group: TPGroup = ALONE.group,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.limits = limits
        self._decoder = decoder
        self._backend = backend
        self._cache = cache
        self._host_cache = host_cache
        self._head = OutputHead(decoder, backend, group)
        self._rows = RowTable(limits.rows)
        self._sampling = SamplingTable(self._rows, grammars)
        # By slot; meaningless where the slot is empty.
        num_slots = limits.rows.num_slots
        self._addresses = Addresses(
            np.zeros(num_slots, np.uint64), np.zeros(num_slots, np.uint64), np.zeros(num_slots, np.int64)
        )
        self._last_step = 0

    @property
    def num_live_rows(self) -> int:
        """Rows that have not ended."""
        return self._rows.num_live

    def reset(self) -> None:
        """Forgets every row and expects step 1 next. What the blocks hold is garbage from here on."""
        self._rows.reset()
        self._last_step = 0

    @torch.inference_mode()
    def run(self, plan: worker_pb2.StepPlan) -> StepOutcome:
        """One step. Raises PlanError before anything is computed when the plan disagrees with the rows."""
        if plan.step != self._last_step + 1:
            raise PlanError(f"the plan is for step {plan.step}, the worker expects {self._last_step + 1}")
        self._last_step = plan.step
        self._apply_deltas(plan)
        slots, counts = self._checked_rows(plan)
        copy_ns = self._copy_blocks(plan)
        return replace(self._compute(plan.step, slots, counts), copy_ns=copy_ns)

    def _apply_deltas(self, plan: worker_pb2.StepPlan) -> None:
        for slot in plan.released_slots:
            self._rows.release(slot)
            self._sampling.release(slot)
        for admission in plan.admissions:
            self._admit(admission)
        if not len(plan.append_slots) == len(plan.append_counts):
            raise PlanError(f"{len(plan.append_slots)} slots get blocks, {len(plan.append_counts)} counts say how many")
        if sum(plan.append_counts) != len(plan.append_block_ids):
            raise PlanError(f"{len(plan.append_block_ids)} blocks appended, the counts say {sum(plan.append_counts)}")
        taken = 0
        for slot, count in zip(plan.append_slots, plan.append_counts, strict=True):
            self._rows.append_blocks(slot, plan.append_block_ids[taken : taken + count])
            taken += count

    def _admit(self, admission: worker_pb2.Admission) -> None:
        if admission.adapter:
            raise PlanError(f"slot {admission.slot}: adapter {admission.adapter!r}, the worker has none")
        self._rows.admit(
            admission.slot,
            admission.token_ids,
            admission.num_prompt_tokens,
            admission.num_computed_tokens,
            admission.block_ids,
        )
        self._sampling.admit(admission.slot, admission.sampling)
        self._addresses.router_ids[admission.slot] = admission.router_id
        self._addresses.stream_keys[admission.slot] = admission.stream_key
        self._addresses.attempts[admission.slot] = admission.attempt

    def _checked_rows(self, plan: worker_pb2.StepPlan) -> tuple[Int64Array, Int64Array]:
        """The plan's slots and token counts, in its order, ended rows included."""
        slots, starts, counts = (
            np.array(values, np.int64) for values in (plan.row_slots, plan.row_starts, plan.row_counts)
        )
        if not len(slots) == len(starts) == len(counts):
            raise PlanError(f"{len(slots)} rows, {len(starts)} starts and {len(counts)} counts")
        if len(slots) and slots.max() >= self.limits.rows.num_slots:
            raise PlanError(f"slot {slots.max()}: the worker has {self.limits.rows.num_slots} slots")
        if counts.sum() > self.limits.max_step_tokens:
            raise PlanError(f"the plan runs {counts.sum()} tokens, a step takes {self.limits.max_step_tokens}")
        self._rows.check_run(slots, starts, counts)
        return slots, counts

    def _copy_blocks(self, plan: worker_pb2.StepPlan) -> int:
        """Between the tiers; returns the nanoseconds that it took, by which the scheduler weighs copies."""
        device_to_host = list(plan.demote_device_ids), list(plan.demote_host_ids)
        host_to_device = list(plan.promote_host_ids), list(plan.promote_device_ids)
        if not any((*device_to_host, *host_to_device)):
            return 0
        if self._host_cache is None:
            raise PlanError("the plan copies blocks between device and host, the worker has no host blocks")
        begun_ns = time.perf_counter_ns()
        try:
            self._backend.copy_blocks(self._cache, device_to_host[0], self._host_cache, device_to_host[1])
            self._backend.copy_blocks(self._host_cache, host_to_device[0], self._cache, host_to_device[1])
        except ValueError as error:
            raise PlanError(f"the plan's block copies: {error}") from error
        return time.perf_counter_ns() - begun_ns

    def _compute(self, step: int, plan_slots: Int64Array, plan_counts: Int64Array) -> StepOutcome:
        """Runs the live rows. A row samples when the step reaches the end of its known tokens."""
        rows = self._rows
        plan_rows = np.flatnonzero(rows.states[plan_slots] == RowState.LIVE)
        slots, counts = plan_slots[plan_rows], plan_counts[plan_rows]
        if not len(slots):
            return StepOutcome(step, len(plan_slots), (), ())
        sampling = np.flatnonzero(rows.num_computed_tokens[slots] + counts == rows.num_tokens[slots])
        prompt = wanted_prompt(rows, self._sampling, slots, counts)
        # The wanted hidden states, in order: one per sampling row, then those of prompt positions.
        hidden = self._forward(slots, counts, np.concatenate([np.cumsum(counts)[sampling] - 1, prompt.token_indexes]))
        rows.commit(slots, counts)
        stretches = self._prompt_stretches(prompt, hidden[len(sampling) :], plan_rows, slots)
        broken = _broken_rows(plan_rows, stretches)
        groups = [self._sample(hidden[: len(sampling)], plan_rows[sampling], slots[sampling], broken[sampling])]
        if broken.any():
            failing = np.setdiff1d(np.flatnonzero(broken), sampling)
            groups.append(self._fail(plan_rows[failing], slots[failing]))
        return StepOutcome(
            step,
            len(plan_slots),
            tuple(group for group in groups if group is not None),
            tuple(stretch for stretch in stretches if stretch.is_finite),
        )

    def _forward(self, slots: Int64Array, counts: Int64Array, wanted: Int64Array) -> Tensor:
        """Hidden states of the wanted tokens of the step, in the order of `wanted`."""
        step_input = build_step_input(self._rows, slots, counts)
        attention = self._backend.plan_attention(step_input.batch, self._cache)
        is_all = len(wanted) == step_input.batch.num_tokens and bool((wanted[1:] > wanted[:-1]).all())
        return self._decoder.forward(
            step_input.token_ids, attention, self._cache, None if is_all else torch.from_numpy(wanted)
        )

    def _prompt_stretches(
        self, prompt: WantedPrompt, hidden: Tensor, plan_rows: Int64Array, slots: Int64Array
    ) -> tuple[PromptStretch, ...]:
        logprobs = compute_prompt_logprobs(self._head, hidden, prompt, self._rows.limits.vocab_size)
        return tuple(
            PromptStretch(int(plan_rows[wanted.row]), self._addresses[int(slots[wanted.row])], wanted.start, found)
            for wanted, found in zip(prompt.stretches, logprobs, strict=True)
        )

    def _sample(
        self, hidden: Tensor, plan_rows: Int64Array, slots: Int64Array, broken: npt.NDArray[np.bool_]
    ) -> SampledRows | None:
        """One token for each row; rows that are `broken` already end, whatever their own logits hold."""
        if not len(slots):
            return None
        rows = self._rows
        batch = self._sampling.batch(slots)
        samples = self._head.sample(hidden, batch)
        token_ids, finite = samples.token_ids.cpu().numpy(), samples.finite.cpu().numpy() & ~broken
        reasons = self._sampling.finish_reasons(slots, token_ids, finite)
        listed = (reasons == 0) | (reasons == types_pb2.FINISH_REASON_LENGTH)
        output_positions = rows.num_tokens[slots] - rows.num_prompt_tokens[slots]
        rows.append_tokens(slots[listed], token_ids[listed])
        for slot in slots[reasons != 0].tolist():
            rows.end(slot)
        return SampledRows(
            plan_rows=plan_rows,
            addresses=self._addresses.take(slots),
            token_ids=token_ids,
            listed=listed,
            finish_reasons=reasons,
            output_positions=output_positions,
            logprobs=self._token_logprobs(samples, batch, slots, listed),
        )

    def _fail(self, plan_rows: Int64Array, slots: Int64Array) -> SampledRows | None:
        """Ends rows of inner chunks whose prompt logits were not finite."""
        if not len(slots):
            return None
        for slot in slots.tolist():
            self._rows.end(slot)
        return SampledRows(
            plan_rows=plan_rows,
            addresses=self._addresses.take(slots),
            token_ids=np.zeros(len(slots), np.int64),
            listed=np.zeros(len(slots), bool),
            finish_reasons=np.full(len(slots), types_pb2.FINISH_REASON_NUMERIC_ERROR, np.int64),
            output_positions=self._rows.num_tokens[slots] - self._rows.num_prompt_tokens[slots],
            logprobs={},
        )

    def _token_logprobs(
        self, samples: Samples, batch: SamplingBatch, slots: Int64Array, listed: npt.NDArray[np.bool_]
    ) -> dict[int, TokenLogprobs]:
        """By index into the sampled rows, for those that asked and whose token is listed."""
        if samples.logprobs is None:
            return {}
        num_tops = {row: self._sampling[int(slots[row])].num_logprobs or 0 for row in batch.logprob_rows.tolist()}
        return {
            row: cut_logprobs(samples.logprobs, slice(index, index + 1), min(num_top, batch.num_top))
            for index, (row, num_top) in enumerate(num_tops.items())
            if listed[row]
        }


def _broken_rows(plan_rows: Int64Array, stretches: tuple[PromptStretch, ...]) -> npt.NDArray[np.bool_]:
    """Which of the rows have prompt logits that are not finite."""
    if not stretches:
        return np.zeros(len(plan_rows), bool)
    return np.isin(plan_rows, [stretch.plan_row for stretch in stretches if not stretch.is_finite])
