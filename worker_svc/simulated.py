"""A runner without a model: checks plans as the real one does, waits as long as a cost model says, and makes tokens up.

Speaks the whole step protocol, so that schedulers, routers and frontends can be tried at any size on any machine.
Imports no torch. Tokens depend on a sequence's seed and on their position alone: the same in any batch, after any
preemption and on any simulated replica; logprobs are made up too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from octavo.cost_model import CostModel, parse_costs
from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.memory import ModelShape
from octavo.phases import Phases
from octavo.process import StartError
from octavo.sources import end_token_ids, resolve, tokenizer_hash, vocabulary_facts
from worker_svc.config import WorkerConfig
from worker_svc.outcome import Address, Addresses, PromptStretch, SampledRows, StepOutcome, TokenLogprobs
from worker_svc.rows import PlanError, RowLimits, RowState, RowTable

_LOG = logging.getLogger(__name__)

_TEXT = " This text was made up by a simulated worker; no model has computed it."
_DEFAULT_KV_BYTES = 16 * 2**30


@dataclass(frozen=True)
class SimulatedModel:
    """What is said in place of a model: the ids that answers repeat, the ids that end them, and at what pace."""

    costs: CostModel
    phrase: tuple[int, ...]
    max_step_tokens: int
    num_host_blocks: int = 0

    def token_id(self, sampling: types_pb2.SamplingParams, position: int) -> int:
        """The token at an output position. Greedy requests all say the same; a seed shifts where the text begins."""
        shift = sampling.seed % len(self.phrase) if sampling.temperature > 0 else 0
        if sampling.end_token_ids and position >= max(self._length(sampling), sampling.min_tokens):
            return min(sampling.end_token_ids)
        return self.phrase[(shift + position) % len(self.phrase)]

    def _length(self, sampling: types_pb2.SamplingParams) -> int:
        """Output tokens before the end token: spread evenly by the seed between half and one and a half of the mean."""
        digest = hashlib.blake2b(sampling.seed.to_bytes(8, "little"), digest_size=4).digest()
        return int(self.costs.output_tokens * (0.5 + int.from_bytes(digest, "little") / 2**32))


@dataclass(frozen=True)
class LoadedSimulation:
    """A simulated worker, as `worker_svc.loading.LoadedWorker` is a real one."""

    runner: SimulatedRunner
    hello: worker_pb2.Hello
    threads: None = None

    def close(self) -> None:
        """Nothing works beside its steps."""


@dataclass(frozen=True)
class SimulatedStep:
    """A step that is over."""

    outcome: StepOutcome

    def is_done(self) -> bool:
        return True

    def result(self) -> StepOutcome:
        return self.outcome


class SimulatedRunner:
    """One replica's rows. `wait_s` waits; tests give one that does not."""

    def __init__(self, model: SimulatedModel, limits: RowLimits, wait_s: Callable[[float], None] = time.sleep) -> None:
        self._model = model
        self._rows = RowTable(limits)
        self._sampling: dict[int, types_pb2.SamplingParams] = {}
        self._addresses: dict[int, Address] = {}
        self._wait_s = wait_s
        self._last_step = 0

    @property
    def num_live_rows(self) -> int:
        """Rows that have not ended."""
        return self._rows.num_live

    def reset(self) -> None:
        """Forgets every row and expects step 1 next."""
        self._rows.reset()
        self._last_step = 0

    def launch(self, plan: worker_pb2.StepPlan) -> SimulatedStep:
        """One step, which is over when this returns. Raises PlanError when the plan disagrees with the rows."""
        return SimulatedStep(self.run(plan))

    def run(self, plan: worker_pb2.StepPlan) -> StepOutcome:
        """One step, as long as it would take. Raises PlanError when the plan disagrees with the rows."""
        if plan.step != self._last_step + 1:
            raise PlanError(f"the plan is for step {plan.step}, the worker expects {self._last_step + 1}")
        self._last_step = plan.step
        self._apply_deltas(plan)
        self._check(plan)
        begun = time.perf_counter()
        live = [
            (row, slot, count)
            for row, (slot, count) in enumerate(zip(plan.row_slots, plan.row_counts, strict=True))
            if self._rows.states[slot] == RowState.LIVE
        ]
        duration_s = self._step_ns(plan, live) / 1e9
        outcome = self._compute(plan, live)
        self._wait_s(max(0.0, duration_s - (time.perf_counter() - begun)))
        return outcome

    def _apply_deltas(self, plan: worker_pb2.StepPlan) -> None:
        for slot in plan.released_slots:
            self._rows.release(slot)
        for admission in plan.admissions:
            self._admit(admission)
        if sum(plan.append_counts) != len(plan.append_block_ids) or len(plan.append_slots) != len(plan.append_counts):
            raise PlanError(f"{len(plan.append_block_ids)} blocks appended, the counts say {sum(plan.append_counts)}")
        taken = 0
        for slot, count in zip(plan.append_slots, plan.append_counts, strict=True):
            self._rows.append_blocks(slot, plan.append_block_ids[taken : taken + count])
            taken += count

    def _admit(self, admission: worker_pb2.Admission) -> None:
        if admission.adapter:
            raise PlanError(f"slot {admission.slot}: adapter {admission.adapter!r}, the worker has none")
        num_tokens, num_computed = admission.num_prompt_tokens, admission.num_computed_tokens
        self._rows.admit(admission.slot, admission.token_ids, num_tokens, num_computed, admission.block_ids)
        self._sampling[admission.slot] = admission.sampling
        entry_position = len(admission.token_ids) - num_tokens
        address = Address(admission.router_id, admission.stream_key, admission.attempt, entry_position)
        self._addresses[admission.slot] = address

    def _check(self, plan: worker_pb2.StepPlan) -> None:
        slots, starts, counts = (
            np.array(values, np.int64) for values in (plan.row_slots, plan.row_starts, plan.row_counts)
        )
        if not len(slots) == len(starts) == len(counts):
            raise PlanError(f"{len(slots)} rows, {len(starts)} starts and {len(counts)} counts")
        limits, num_tokens = self._rows.limits, int(counts.sum())
        if len(slots) and slots.max() >= limits.num_slots:
            raise PlanError(f"slot {slots.max()}: the worker has {limits.num_slots} slots")
        if num_tokens > self._model.max_step_tokens:
            raise PlanError(f"the plan runs {num_tokens} tokens, a step takes {self._model.max_step_tokens}")
        self._rows.check_run(slots, starts, counts)
        for ids, others, num_blocks in (
            (plan.demote_device_ids, plan.demote_host_ids, limits.num_blocks),
            (plan.demote_host_ids, plan.demote_device_ids, self._model.num_host_blocks),
            (plan.promote_host_ids, plan.promote_device_ids, self._model.num_host_blocks),
            (plan.promote_device_ids, plan.promote_host_ids, limits.num_blocks),
        ):
            if len(ids) != len(others) or (len(ids) and max(ids) >= num_blocks):
                raise PlanError(f"the plan copies blocks {list(ids)[:8]}; there are {num_blocks}, in pairs")

    def _step_ns(self, plan: worker_pb2.StepPlan, live: list[tuple[int, int, int]]) -> int:
        computed = self._rows.num_computed_tokens
        decoding = [slot for _, slot, count in live if count == 1]
        num_prefill = sum(count for _, _, count in live if count > 1)
        num_copies = len(plan.demote_host_ids) + len(plan.promote_host_ids)
        return self._model.costs.step_ns(num_prefill, len(decoding), int(computed[decoding].sum()), num_copies)

    def _compute(self, plan: worker_pb2.StepPlan, live: list[tuple[int, int, int]]) -> StepOutcome:
        rows = self._rows
        stretches: list[PromptStretch] = []
        sampling: list[tuple[int, int]] = []
        for row, slot, count in live:
            computed = int(rows.num_computed_tokens[slot])
            stretches += self._prompt_stretch(row, slot, computed, count)
            rows.num_computed_tokens[slot] = computed + count
            if computed + count == rows.num_tokens[slot]:
                sampling.append((row, slot))
        groups = (self._sample(sampling),) if sampling else ()
        return StepOutcome(plan.step, len(plan.row_slots), groups, tuple(stretches))

    def _sample(self, sampling: list[tuple[int, int]]) -> SampledRows:
        rows, slots = self._rows, np.array([slot for _, slot in sampling], np.int64)
        positions = rows.num_tokens[slots] - rows.num_prompt_tokens[slots]
        token_ids, reasons = [], []
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            token_id = self._model.token_id(self._sampling[slot], position)
            token_ids.append(token_id)
            reasons.append(self._finish_reason(slot, token_id, position))
        ids, finish_reasons = np.array(token_ids, np.int64), np.array(reasons, np.int64)
        listed = (finish_reasons == 0) | (finish_reasons == types_pb2.FINISH_REASON_LENGTH)
        rows.append_tokens(slots[listed], ids[listed])
        for slot in slots[finish_reasons != 0].tolist():
            rows.end(slot)
        logprobs = {
            index: _made_up(ids[index : index + 1], self._sampling[slot].num_logprobs, rows.limits.vocab_size)
            for index, slot in enumerate(slots.tolist())
            if listed[index] and self._sampling[slot].HasField("num_logprobs")
        }
        return SampledRows(
            plan_rows=np.array([row for row, _ in sampling], np.int64),
            addresses=Addresses.of(*(self._addresses[slot] for slot in slots.tolist())),
            token_ids=ids,
            listed=listed,
            finish_reasons=finish_reasons,
            output_positions=positions,
            logprobs=logprobs,
        )

    def _finish_reason(self, slot: int, token_id: int, position: int) -> int:
        sampling = self._sampling[slot]
        if token_id in sampling.end_token_ids:
            return types_pb2.FINISH_REASON_END_TOKEN
        if token_id in sampling.stop_token_ids and position >= sampling.min_tokens:
            return types_pb2.FINISH_REASON_STOP_TOKEN
        is_last = position + 1 >= sampling.max_tokens
        at_limit = int(self._rows.num_tokens[slot]) + 1 >= self._rows.limits.max_model_len
        return types_pb2.FINISH_REASON_LENGTH if is_last or at_limit else 0

    def _prompt_stretch(self, row: int, slot: int, computed: int, count: int) -> list[PromptStretch]:
        """Computing prompt positions [a, b) yields the logprobs of those from a + 1 to b."""
        sampling = self._sampling[slot]
        start = max(computed + 1, sampling.prompt_logprobs_start)
        end = min(computed + count, int(self._rows.num_prompt_tokens[slot]) - 1) + 1
        if not sampling.HasField("num_prompt_logprobs") or start >= end:
            return []
        ids = self._rows.token_ids[slot, start:end].astype(np.int64)
        logprobs = _made_up(ids, sampling.num_prompt_logprobs, self._rows.limits.vocab_size)
        return [PromptStretch(row, self._addresses[slot], start, logprobs)]


def _made_up(token_ids: np.ndarray[tuple[int], np.dtype[np.int64]], num_top: int, vocab_size: int) -> TokenLogprobs:
    """Each token first, then the ids after it, each half as likely as the one before."""
    num_top = min(num_top, vocab_size)
    steps = np.arange(num_top)
    top = np.broadcast_to((-(steps + 1) * np.log(2)).astype(np.float32), (len(token_ids), num_top))
    tokens = np.full(len(token_ids), -np.log(2), np.float32)
    return TokenLogprobs(tokens, (token_ids[:, None] + steps) % vocab_size, np.ascontiguousarray(top))


def load_simulation(config: WorkerConfig, phases: Phases) -> LoadedSimulation:
    """A simulated worker for the model's tokenizer and sizes; its weights are never read.

    Raises StartError or SourceError with a cause that the operator can mend.
    """
    costs = parse_costs(config.simulated_costs)
    with phases.phase("model"):
        directory = resolve(config.model).directory
        fields = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        max_model_len = config.max_model_len or ModelShape.from_config(fields).max_model_len
    with phases.phase("tokenizer"):
        vocab_size = vocabulary_facts(directory).highest_token_id + 1
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        phrase = tuple(tokenizer.encode(_TEXT, add_special_tokens=False).ids)
    num_blocks = config.num_kv_blocks or costs.num_blocks(
        config.kv_cache_memory or _DEFAULT_KV_BYTES, config.block_size
    )
    if num_blocks < 1:
        raise StartError(
            f"--kv-cache-memory holds no block of {config.block_size} tokens at {costs.kv_bytes:g} bytes a token; "
            "raise it, or lower kv_bytes in --simulated-costs"
        )
    limits = RowLimits(config.max_num_seqs, max_model_len, config.block_size, num_blocks, vocab_size)
    num_host_blocks = costs.num_blocks(config.swap_bytes, config.block_size)
    model = SimulatedModel(costs, phrase, config.max_num_batched_tokens, num_host_blocks)
    _LOG.warning("this worker is simulated: it computes nothing and its text is made up (%s)", costs)
    hello = worker_pb2.Hello(
        model=types_pb2.ModelInfo(
            name=config.served_model_name or (Path(config.model).name or directory.name),
            fingerprint=f"simulated {tokenizer_hash(directory)}",
            tokenizer_hash=tokenizer_hash(directory),
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            end_token_ids=sorted(token_id for token_id in end_token_ids(directory) if token_id < vocab_size),
            numerics="simulated",
            batch_invariant=True,
        ),
        block_size=config.block_size,
        num_device_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        num_slots=config.max_num_seqs,
        max_step_tokens=config.max_num_batched_tokens,
        warm_up_token_ns=costs.step_ns(1, 0, 0),
    )
    return LoadedSimulation(SimulatedRunner(model, limits), hello)
