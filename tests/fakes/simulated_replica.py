"""A replica without tensors: executes step plans, and refuses any plan that disagrees with its rows or its memory.

The next token is a hash of all tokens before it, read from the simulated KV blocks, so a lost, doubled or misplaced
token or block shows in every token after it. Speaks the core's plain data; knows nothing of how plans are made.
`continuation` is the oracle: what a sequence yields alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.plan import Admission, StepPlan, StepResult
from scheduler_svc.core.types import FinishReason, ReplicaSpec

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15
_GARBAGE = -1


class PlanDisagrees(AssertionError):
    """A plan contradicts the replica's rows, memory or limits."""


@dataclass(frozen=True)
class SimulatedSampling:
    """What the replica looks at of sampling parameters; the wire's SamplingParams will do as well."""

    max_tokens: int
    end_token_ids: Sequence[int] = ()
    stop_token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Delivery:
    """New tokens of one sequence for its router: one element of a TokenBatch."""

    router_id: int
    stream_key: int
    attempt: int
    position: int
    """Output position of the first token; prior ones count."""
    token_ids: tuple[int, ...]
    finish: FinishReason | None
    final_token_id: int | None
    """The end or stop token that ended it."""
    entry_position: int
    """Output tokens that it was admitted with."""


@dataclass(frozen=True)
class StepOutcome:
    """What one executed plan sends up and out."""

    result: StepResult
    deliveries: tuple[Delivery, ...]
    lost: tuple[Delivery, ...]
    """Those that could not be handed to their router."""


@dataclass
class _Row:
    admission: Admission
    token_ids: list[int]
    block_ids: list[int]
    num_computed: int
    states: list[int] = field(default_factory=list)  # KV that each computed position must hold
    has_ended: bool = False


def next_state(state: int, token_id: int) -> int:
    """The KV of a position: a hash of its token and of the KV before it."""
    mixed = ((state ^ token_id) * 0xBF58476D1CE4E5B9 + token_id + 1) & _MASK
    return mixed ^ (mixed >> 31)


def states_of(token_ids: Sequence[int]) -> Iterator[int]:
    """The KV of each position."""
    state = _START
    for token_id in token_ids:
        state = next_state(state, token_id)
        yield state


def sampled_token(state: int, vocab_size: int) -> int:
    """The token that follows."""
    return (state >> 17) % vocab_size


def continuation(
    prompt: Sequence[int], sampling: SimulatedSampling, vocab_size: int, max_model_len: int
) -> tuple[list[int], FinishReason]:
    """What a sequence yields alone: its output and why it ends."""
    output: list[int] = []
    state = deque(states_of(prompt), maxlen=1)[0]
    while True:
        token_id = sampled_token(state, vocab_size)
        if token_id in sampling.end_token_ids:
            return output, FinishReason.END_TOKEN
        if token_id in sampling.stop_token_ids:
            return output, FinishReason.STOP_TOKEN
        output.append(token_id)
        state = next_state(state, token_id)
        if len(output) >= sampling.max_tokens or len(prompt) + len(output) >= max_model_len:
            return output, FinishReason.LENGTH


class SimulatedReplica:
    """Takes plans with `receive` and executes them in order with `run`."""

    def __init__(self, spec: ReplicaSpec, vocab_size: int) -> None:
        self.spec = spec
        self.vocab_size = vocab_size
        self.unreachable_routers: set[int] = set()
        """Routers to which no token can be handed."""
        self.numeric_errors: set[int] = set()
        """Stream keys whose next sample fails; the KV written in that step is garbage."""
        self.duration_ns = 1_000_000
        """Time of a step."""
        self.token_ns = 0
        """Time that each of its tokens adds."""
        self.copy_ns = 0
        """Time that the copy of a block takes."""
        self.inbox: deque[StepPlan] = deque()
        self._rows: dict[int, _Row] = {}
        self._memory = [[_GARBAGE] * spec.block_size for _ in range(spec.num_device_blocks)]
        self._host_memory = [[_GARBAGE] * spec.block_size for _ in range(spec.num_host_blocks)]
        self._num_tables: Counter[int] = Counter()  # block -> rows whose table holds it
        self._next_step = 1

    @property
    def num_rows(self) -> int:
        """Slots that are occupied, by ended rows too."""
        return len(self._rows)

    def receive(self, plan: StepPlan) -> None:
        """A plan arrives."""
        self.inbox.append(plan)

    def choose(self, admission: Admission, state: int) -> int:
        """The token that follows; another model overrides this."""
        return sampled_token(state, self.vocab_size)

    def run(self) -> StepOutcome:
        """Executes the oldest plan. Raises PlanDisagrees, or IndexError if there is none."""
        plan = self.inbox.popleft()
        _demand(plan.incarnation == self.spec.incarnation, f"plan for incarnation {plan.incarnation}")
        _demand(plan.step == self._next_step, f"step {plan.step} where {self._next_step} is due")
        self._next_step += 1
        for slot in plan.released_slots:
            _demand(slot in self._rows, f"slot {slot} is released and empty")
            self._num_tables.subtract(self._rows.pop(slot).block_ids)
        for admission in plan.admissions:
            self._admit(admission)
        self._append_blocks(plan)
        self._copy_blocks(plan)
        _demand(len(plan.row_slots) > 0, "a plan without rows")
        _demand(len(set(plan.row_slots)) == len(plan.row_slots), f"a slot has two rows: {plan.row_slots}")
        _demand(len(plan.row_slots) == len(plan.row_starts) == len(plan.row_counts), "row lists are not parallel")
        num_tokens = sum(plan.row_counts)
        _demand(num_tokens <= self.spec.max_step_tokens, f"{num_tokens} tokens exceed {self.spec.max_step_tokens}")
        return self._compute(plan)

    def step_ns(self, plan: StepPlan) -> int:
        """Time that a plan takes."""
        return self.duration_ns + self.token_ns * sum(plan.row_counts)

    def _copy_blocks(self, plan: StepPlan) -> None:
        """Demotions, then promotions; copies of one direction may happen in any order."""
        _copy(plan.demote_device_ids, self._memory, plan.demote_host_ids, self._host_memory, "demotion")
        _copy(plan.promote_host_ids, self._host_memory, plan.promote_device_ids, self._memory, "promotion")

    def _admit(self, admission: Admission) -> None:
        size, name = self.spec.block_size, f"admission to slot {admission.slot}"
        _demand(0 <= admission.slot < self.spec.num_slots and admission.slot not in self._rows, f"{name}: not free")
        num_tokens, num_computed = len(admission.token_ids), admission.num_computed_tokens
        _demand(0 < admission.num_prompt_tokens <= num_tokens, f"{name}: {admission.num_prompt_tokens} prompt tokens")
        _demand(num_computed % size == 0 and num_computed < num_tokens, f"{name}: {num_computed} tokens computed")
        row = _Row(admission, list(admission.token_ids), [], num_computed)
        row.states = list(states_of(row.token_ids[:num_computed]))
        self._rows[admission.slot] = row
        self._extend_table(row, admission.block_ids)

    def _append_blocks(self, plan: StepPlan) -> None:
        _demand(sum(plan.append_counts) == len(plan.append_block_ids), "appended blocks are miscounted")
        index = 0
        for slot, count in zip(plan.append_slots, plan.append_counts, strict=True):
            _demand(slot in self._rows, f"blocks appended to empty slot {slot}")
            self._extend_table(self._rows[slot], plan.append_block_ids[index : index + count])
            index += count

    def _extend_table(self, row: _Row, block_ids: Sequence[int]) -> None:
        row.block_ids.extend(block_ids)
        self._num_tables.update(block_ids)
        valid = all(0 <= block < self.spec.num_device_blocks for block in row.block_ids)
        _demand(valid and len(set(row.block_ids)) == len(row.block_ids), f"bad block table {row.block_ids}")

    def _compute(self, plan: StepPlan) -> StepOutcome:
        num_sampled: list[int] = []
        sampled: list[int] = []
        deliveries: list[Delivery] = []
        lost: list[Delivery] = []
        finishes: dict[int, FinishReason] = {}
        undelivered: list[int] = []
        for index, slot in enumerate(plan.row_slots):
            _demand(slot in self._rows, f"row {index} is of empty slot {slot}")
            row = self._rows[slot]
            delivery = None if row.has_ended else self._compute_row(row, plan.row_starts[index], plan.row_counts[index])
            num_sampled.append(0 if delivery is None else len(delivery.token_ids))
            if delivery is None:
                continue
            sampled.extend(delivery.token_ids)
            if delivery.finish is not None:
                finishes[index] = delivery.finish
            if delivery.router_id in self.unreachable_routers:
                undelivered.append(index)
                lost.append(delivery)
            else:
                deliveries.append(delivery)
        num_copies = len(plan.demote_host_ids) + len(plan.promote_host_ids)
        result = StepResult(
            plan.incarnation,
            plan.step,
            num_sampled,
            sampled,
            finishes,
            undelivered,
            self.step_ns(plan),
            self.copy_ns * num_copies,
        )
        return StepOutcome(result, tuple(deliveries), tuple(lost))

    def _compute_row(self, row: _Row, start: int, count: int) -> Delivery | None:
        key, size = row.admission.stream_key, self.spec.block_size
        end = start + count
        _demand(start == row.num_computed, f"row of {key} starts at {start}, has {row.num_computed} computed")
        _demand(count > 0 and end <= len(row.token_ids), f"row of {key} ends at {end} of {len(row.token_ids)} tokens")
        _demand(end <= len(row.block_ids) * size, f"row of {key} ends at {end}, has {len(row.block_ids)} blocks")
        state = self._read(row, start)
        fails = key in self.numeric_errors and end == len(row.token_ids)
        for position in range(start, end):
            block = row.block_ids[position // size]
            _demand(self._num_tables[block] == 1, f"row of {key} writes block {block}, which another row holds")
            state = next_state(state, row.token_ids[position])
            self._memory[block][position % size] = _GARBAGE if fails else state
            row.states.append(state)
        row.num_computed = end
        return self._sample(row, state, fails) if end == len(row.token_ids) else None

    def _read(self, row: _Row, num_tokens: int) -> int:
        """KV of the last of the first so many positions, all of which are compared with what they must hold."""
        size = self.spec.block_size
        for index in range(-(-num_tokens // size)):
            wanted = row.states[index * size : min((index + 1) * size, num_tokens)]
            found = self._memory[row.block_ids[index]][: len(wanted)]
            name = f"row of {row.admission.stream_key}: block {row.block_ids[index]}, number {index} of its table"
            _demand(found == wanted, f"{name}, holds other tokens")
        return row.states[num_tokens - 1] if num_tokens else _START

    def _sample(self, row: _Row, state: int, fails: bool) -> Delivery:
        admission = row.admission
        sampling: SimulatedSampling = admission.sampling  # type: ignore[assignment]  # opaque to the core alone
        num_output = len(row.token_ids) - admission.num_prompt_tokens
        token_id = self.choose(admission, state)
        tokens: tuple[int, ...] = ()
        finish: FinishReason | None = None
        if fails:
            finish = FinishReason.NUMERIC_ERROR
            self.numeric_errors.discard(admission.stream_key)
        elif token_id in sampling.end_token_ids:
            finish = FinishReason.END_TOKEN
        elif token_id in sampling.stop_token_ids:
            finish = FinishReason.STOP_TOKEN
        else:
            tokens = (token_id,)
            row.token_ids.append(token_id)
            if num_output + 1 >= sampling.max_tokens or len(row.token_ids) >= self.spec.max_model_len:
                finish = FinishReason.LENGTH
        row.has_ended = finish is not None
        ended_by_token = finish in (FinishReason.END_TOKEN, FinishReason.STOP_TOKEN)
        return Delivery(
            admission.router_id,
            admission.stream_key,
            admission.attempt,
            num_output,
            tokens,
            finish,
            token_id if ended_by_token else None,
            len(admission.token_ids) - admission.num_prompt_tokens,
        )


def _copy(
    sources: Sequence[int], memory: list[list[int]], targets: Sequence[int], target_memory: list[list[int]], name: str
) -> None:
    _demand(len(sources) == len(targets), f"{name} lists are not parallel")
    _demand(len(set(targets)) == len(targets), f"a block is the target of two {name}s: {targets}")
    valid = all(0 <= block < len(memory) for block in sources) and all(0 <= b < len(target_memory) for b in targets)
    _demand(valid, f"{name} of blocks {sources} to {targets}")
    for source, target in zip(sources, targets, strict=True):
        _demand(_GARBAGE not in memory[source], f"{name} of block {source}, which is not full")
        target_memory[target] = list(memory[source])


def _demand(holds: bool, message: str) -> None:
    if not holds:
        raise PlanDisagrees(message)
