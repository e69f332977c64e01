"""Executes step plans on one replica: applies the plan's deltas to the rows, launches the model, settles its results.

The order of effects is the protocol's: releases, admissions, appended blocks, block copies, compute. On a device that
runs ahead a step is launched before the last one is settled: its decode rows begin with "the token you sampled last",
which only the device knows. Knows rows, model and kernels; no sockets. Raises PlanError for a plan that disagrees with
the rows; the caller then drops them all (`reset`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.api import Backend, KVCache
from octavo.internal.v1 import worker_pb2
from worker_svc.block_copies import BlockCopies
from worker_svc.decode_graphs import GraphModel
from worker_svc.device.api import Aside, Device, Mark
from worker_svc.device.cpu import CPU
from worker_svc.device.staging import STEPS_IN_FLIGHT, Downloads
from worker_svc.grammar import GrammarCompiler
from worker_svc.model.decoder import Decoder
from worker_svc.outcome import Address, Addresses, PromptStretch, StepOutcome
from worker_svc.output_head import OutputHead
from worker_svc.parallel.group import ALONE, TPGroup
from worker_svc.prompt_logprobs import WantedPrompt, compute_prompt_logprobs, wanted_prompt
from worker_svc.rows import Int64Array, PlanError, RowLimits, RowState, RowTable
from worker_svc.sampling import SamplingTable
from worker_svc.settling import LaunchedStep, Sampling, Settler, requested_tops
from worker_svc.step_model import StepModel


@dataclass(frozen=True)
class RunnerLimits:
    """What Hello promises of one step, beside the rows' own limits."""

    rows: RowLimits
    max_step_tokens: int


@dataclass(frozen=True)
class RunnerParts:
    """What one rank computes with. `graph_rows` are the numbers of rows that decode graphs are made for."""

    decoder: Decoder
    backend: Backend
    cache: KVCache
    host_cache: KVCache | None = None
    group: TPGroup = ALONE.group
    device: Device = CPU
    graph_rows: tuple[int, ...] = ()


class StepInFlight:
    """A launched step. Its outcome can be had once; earlier steps are settled first."""

    def __init__(self, runner: Runner, launched: LaunchedStep, aside: Aside | None, mark: Mark) -> None:
        self.launched = launched
        self._runner = runner
        self._aside = aside
        self._mark = mark
        self.outcome: StepOutcome | None = None

    def is_done(self) -> bool:
        """Whether `result` would not wait."""
        return self.outcome is not None or self._mark.is_reached()

    def wait(self) -> None:
        """Until it is computed."""
        self._mark.wait()

    def result(self) -> StepOutcome:
        """Waits for it. Raises PlanError where the kernels found that the plan disagrees with the rows."""
        self._runner.settle_through(self)
        assert self.outcome is not None, "the runner was reset meanwhile"
        return self.outcome

    def settle(self, settler: Settler) -> None:
        """For the runner, in the order of launches. The step's uploads are over with it, also where nothing sampled.

        Its block copies may run on: they have kept nobody waiting, and how long they take stays unknown.
        """
        self.wait()
        outcome = settler.settle(self.launched)
        copy_ns = None if self._aside is None else self._aside.duration_ns()
        self.outcome = replace(outcome, copy_ns=copy_ns) if copy_ns else outcome


class Runner:
    """One replica's rows and the model that advances them. Used by one thread.

    Of a tensor-parallel group each rank has one, which runs the same plans in the same order and keeps equal rows; rank
    0's outcomes are the replica's.
    """

    def __init__(self, parts: RunnerParts, limits: RunnerLimits, grammars: GrammarCompiler | None = None) -> None:
        self.limits = limits
        self._device = parts.device
        self._rows = RowTable(limits.rows)
        self._sampling = SamplingTable(self._rows, grammars)
        # By slot; meaningless where the slot is empty.
        self._addresses = Addresses.of(*[Address(0, 0, 0)] * limits.rows.num_slots)
        self._head = OutputHead(parts.decoder, parts.backend, parts.group)
        model = GraphModel(parts.decoder, parts.backend, parts.cache)
        self._model = StepModel(parts.device, self._rows, model, parts.graph_rows)
        self._copies = BlockCopies(parts.device, parts.backend, self._rows, parts.cache, parts.host_cache)
        self._settler = Settler(self._rows, self._sampling, self._addresses, Downloads(parts.device))
        self._unsettled: deque[StepInFlight] = deque()
        self._last_step = 0

    @property
    def num_live_rows(self) -> int:
        """Rows that have not ended."""
        return self._rows.num_live

    def capture_graphs(self) -> None:
        """Makes the graphs of decode steps, where the device has any."""
        self._model.capture()

    def reset(self) -> None:
        """Forgets every row and expects step 1 next. What the blocks hold is garbage from here on."""
        if self._unsettled:
            self._unsettled[-1].wait()  # the memory of its uploads is about to be used again
        self._unsettled.clear()
        self._rows.reset()
        self._last_step = 0

    def run(self, plan: worker_pb2.StepPlan) -> StepOutcome:
        """One step, launched and settled. Raises PlanError as `launch` and `StepInFlight.result` do."""
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: worker_pb2.StepPlan) -> StepInFlight:
        """Begins one step, while the one before may still run.

        Raises PlanError before anything is computed when the plan disagrees with the rows.
        """
        if plan.step != self._last_step + 1:
            raise PlanError(f"the plan is for step {plan.step}, the worker expects {self._last_step + 1}")
        self._last_step = plan.step
        self._settle_before(plan)
        self._model.inputs.begin_step()
        with self._device.range(f"step {plan.step}"):
            self._apply_deltas(plan)
            slots, counts = self._checked_rows(plan)
            aside = self._copies.launch(plan)
            launched, mark = self._compute(plan.step, slots, counts)
        flight = StepInFlight(self, launched, aside, mark)
        self._unsettled.append(flight)
        if launched.prompt_stretches or not self._device.runs_ahead:
            self.settle_through(flight)
        return flight

    def settle_through(self, flight: StepInFlight) -> None:
        """Settles this step and those before it, if they are not."""
        while flight.outcome is None and self._unsettled:
            self._unsettled.popleft().settle(self._settler)

    def _settle_before(self, plan: worker_pb2.StepPlan) -> None:
        """All but the last step; that one too where the plan touches what its tokens decide."""
        while len(self._unsettled) >= STEPS_IN_FLIGHT:
            self.settle_through(self._unsettled[0])
        if not self._unsettled:
            return
        slots = np.array([slot for slot in plan.row_slots if slot < self.limits.rows.num_slots], np.int64)
        undecided = set().union(*(flight.launched.slots.tolist() for flight in self._unsettled))
        if not undecided.isdisjoint(plan.released_slots) or self._sampling.needs_settled(slots):
            self.settle_through(self._unsettled[-1])

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
        entry_position = len(admission.token_ids) - admission.num_prompt_tokens
        address = Address(admission.router_id, admission.stream_key, admission.attempt, entry_position)
        self._addresses[admission.slot] = address

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

    def _compute(self, step: int, plan_slots: Int64Array, plan_counts: Int64Array) -> tuple[LaunchedStep, Mark]:
        """Launches the live rows. A row samples when the step reaches the end of its known tokens."""
        rows = self._rows
        plan_rows = np.flatnonzero(self._is_going(plan_slots))
        slots, counts = plan_slots[plan_rows], plan_counts[plan_rows]
        if not len(slots):
            return LaunchedStep(step, len(plan_slots), None, (_NONE, _NONE), ()), self._device.mark()
        self._copies.await_for(slots)
        sampling = np.flatnonzero(rows.num_computed_tokens[slots] + counts == rows.num_tokens[slots])
        prompt = wanted_prompt(rows, self._sampling, slots, counts)
        # The wanted hidden states, in order: one per sampling row, then those of prompt positions.
        wanted = np.concatenate([np.cumsum(counts)[sampling] - 1, prompt.token_indexes])
        found = self._model.forward(slots, counts, wanted)
        rows.commit(slots, counts)
        stretches: tuple[PromptStretch, ...] = ()
        if prompt.stretches:
            stretches = self._prompt_stretches(prompt, found.hidden[len(sampling) :], plan_rows, slots)
        broken = _broken_rows(plan_rows, stretches)
        faults = () if found.faults is None else (found.faults,)
        sampled = None
        if len(sampling):
            with self._device.range(f"sampling of {len(sampling)} rows"):
                chosen = plan_rows[sampling], slots[sampling], broken[sampling]
                sampled = self._sample(found.hidden[: len(sampling)], *chosen, faults)
        failing = np.setdiff1d(np.flatnonzero(broken), sampling) if broken.any() else _NONE
        launched = LaunchedStep(step, len(plan_slots), sampled, (plan_rows[failing], slots[failing]), stretches)
        return launched, self._device.mark() if sampled is None else sampled.fetched.mark

    def _is_going(self, slots: Int64Array) -> npt.NDArray[np.bool_]:
        """Live, and not ending by their length with a token that is still being sampled."""
        rows = self._rows
        num_tokens = rows.num_tokens[slots]
        is_last = (rows.num_settled_tokens[slots] < num_tokens) & self._sampling.at_length(slots, num_tokens)
        is_going: npt.NDArray[np.bool_] = (rows.states[slots] == RowState.LIVE) & ~is_last
        return is_going

    def _prompt_stretches(
        self, prompt: WantedPrompt, hidden: Tensor, plan_rows: Int64Array, slots: Int64Array
    ) -> tuple[PromptStretch, ...]:
        logprobs = compute_prompt_logprobs(self._head, hidden, prompt, self._rows.limits.vocab_size)
        return tuple(
            PromptStretch(int(plan_rows[wanted.row]), self._addresses[int(slots[wanted.row])], wanted.start, found)
            for wanted, found in zip(prompt.stretches, logprobs, strict=True)
        )

    def _sample(
        self,
        hidden: Tensor,
        plan_rows: Int64Array,
        slots: Int64Array,
        broken: npt.NDArray[np.bool_],
        faults: tuple[Tensor, ...],
    ) -> Sampling:
        """Launches one token for each row; rows that are `broken` end, whatever their own logits hold."""
        batch = self._sampling.batch(slots)
        samples = self._head.sample(hidden, self._model.inputs.sampling(batch))
        self._model.inputs.remember(slots, samples.token_ids)
        self._rows.expect_tokens(slots)
        return Sampling(
            plan_rows=plan_rows,
            slots=slots,
            num_tokens=self._rows.num_tokens[slots],
            broken=broken,
            num_tops=requested_tops(samples, batch, self._sampling, slots),
            fetched=self._settler.fetch(samples, faults),
        )


_NONE: Int64Array = np.zeros(0, np.int64)


def _broken_rows(plan_rows: Int64Array, stretches: tuple[PromptStretch, ...]) -> npt.NDArray[np.bool_]:
    """Which of the rows have prompt logits that are not finite."""
    if not stretches:
        return np.zeros(len(plan_rows), bool)
    return np.isin(plan_rows, [stretch.plan_row for stretch in stretches if not stretch.is_finite])
