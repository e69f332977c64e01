"""One replica: its rows, its slots and its plans. Makes steps and takes their answers.

Knows its own sequences and blocks; must not know queues, other replicas or events. Preempts as `preemption.py` says.

    open_step -> admit, preempt ... -> close_step -> complete (in the order of the steps)
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from operator import attrgetter

from scheduler_svc.core.answers import take_answer
from scheduler_svc.core.counters import ReplicaCounters
from scheduler_svc.core.growth import Growth
from scheduler_svc.core.kv_space import Prefix
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import Admission, Limit, StepPlan, StepResult
from scheduler_svc.core.preemption import choose_mode, copies_pay
from scheduler_svc.core.rates import StepRates, prefill_cap
from scheduler_svc.core.room_to_grow import may_grow
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.step import Answer, Eviction, StepDraft, UnansweredPlan, chunk_tokens
from scheduler_svc.core.types import ReplicaSpec, ResultMismatch

_rank = attrgetter("rank")
_MANY_COPIES = 20
"""A step of whose time copies take more than one such part says nothing of what tokens cost."""


class Replica:
    """A replica from `attach` to `detach`."""

    def __init__(self, spec: ReplicaSpec, limits: CoreLimits) -> None:
        self.spec = spec
        self.rows = Rows(spec, limits.enable_prefix_caching, tenants_share=limits.tenants_share_prefixes)
        self.kv = self.rows.kv
        self.max_step_tokens = min(spec.max_step_tokens, limits.max_num_batched_tokens or spec.max_step_tokens)
        self.max_running = min(spec.num_slots, limits.max_num_seqs or spec.num_slots, self.max_step_tokens)
        self.max_unanswered_plans = limits.max_unanswered_plans
        self.blocked_at: tuple[Limit, tuple[int, ...]] | None = None
        """Why nothing that waits fitted, and the state of queue and memory then (admission)."""
        self.no_room_at: int | None = None
        """How many steps had been answered when the plan before left somebody waiting for want of slots, blocks or
        tokens; None: it left nobody (scheduler)."""
        self.is_draining = False
        """Whether nothing more may enter (scheduler)."""
        self.rates = StepRates()
        self.growth = Growth(spec.block_size, limits.expected_output_tokens)
        self.counters = ReplicaCounters()
        self._limits = limits
        self._next_step = 1

    # What others ask ---------------------------------------------------------------------------------------------

    @property
    def has_slot(self) -> bool:
        """Whether one more may run."""
        return len(self.rows.running) < self.max_running and not self.is_draining

    @property
    def is_full(self) -> bool:
        """Whether it holds as many unanswered plans as it may."""
        return len(self.rows.unanswered) >= self.max_unanswered_plans

    @property
    def had_no_room(self) -> bool:
        """Whether whoever starts now had to wait for room: who starts before another answer found it."""
        return self.no_room_at is not None and self.no_room_at < self.counters.num_steps

    @property
    def load_tokens(self) -> int:
        """Known tokens whose computation is not answered yet, plus one per running sequence."""
        rows = self.rows
        if rows.load_tokens is None:
            num_unplanned = sum(len(row.token_ids) - row.num_planned_tokens for row in rows.filling)
            rows.load_tokens = len(rows.running) + num_unplanned + sum(plan.num_tokens for plan in rows.unanswered)
        return rows.load_tokens

    def could_hold(self, sequence: Sequence) -> bool:
        """Whether the sequence fits if nothing else is there."""
        num_tokens = len(sequence.token_ids)
        fits = self.kv.num_blocks_for(num_tokens) <= self.spec.num_device_blocks
        return fits and num_tokens < self.spec.max_model_len

    @property
    def max_prefill_tokens(self) -> int | None:
        """Most prompt tokens in a step while sequences decode; None: as many as fit."""
        measured = prefill_cap(self.rates, len(self.rows.steady), self._limits.target_inter_token_ns)
        caps = [cap for cap in (measured, self._limits.max_prefill_tokens) if cap is not None]
        # A block at least, so that prompts go on whatever is aimed at.
        return max(min(caps), self.spec.block_size) if caps else None

    def has_growth_room(self, sequence: Sequence, prefix: Prefix, worse: Items[Sequence] = ()) -> bool:
        """Whether the sequence may enter without, as far as can be foreseen, someone having to leave for it later who
        is not among the `worse`, whom it may displace."""
        return may_grow(self.rows, self.growth, self._next_step, (sequence, prefix), worse)

    # Making a step -----------------------------------------------------------------------------------------------

    def open_step(self) -> StepDraft:
        """Begins a step: every running row gets its blocks (or someone is preempted for them) and its tokens."""
        draft = StepDraft(num_left=0)
        due = self.rows.steady.pop_due()
        for sequence in sorted(due, key=_rank, reverse=True):
            if sequence.state is not State.RUNNING or sequence.replica_id != self.spec.replica_id:
                continue  # preempted for one before it
            start = self.rows.steady.start_of(sequence)
            if start % self.spec.block_size == 0 and not self._grow(draft, sequence):
                continue
            if start + 2 == due[sequence]:
                draft.finals[sequence] = None
            else:
                self.rows.steady.stay(sequence, due[sequence])
        # One token is set aside for every row: a row that runs is never left out.
        num_filling, num_steady = len(self.rows.filling), len(self.rows.steady)
        draft.num_left = self.max_step_tokens - num_steady - num_filling
        cap = self.max_prefill_tokens if num_steady else None
        if cap is not None and cap - num_filling < draft.num_left:
            draft.num_left = max(0, cap - num_filling)
            draft.token_limit = Limit.PREFILL_CAP
        if not self.rows.running:
            self.growth.note_empty()
        return draft

    def share_tokens(self, draft: StepDraft, others_wait: bool) -> None:
        """Gives the rows that run already their tokens; `others_wait`: someone may still be admitted."""
        for index in range(len(self.rows.filling) - 1, -1, -1):
            sequence = self.rows.filling[index]
            num_wanted = len(sequence.token_ids) - sequence.num_planned_tokens
            share = chunk_tokens(num_wanted, draft.num_left + 1, others_wait or index > 0)
            draft.shares[sequence] = share
            draft.num_left -= share - 1

    def admit(self, draft: StepDraft, sequence: Sequence, prefix: Prefix, others_wait: bool) -> None:
        """Gives a waiting sequence a slot, blocks and tokens of this step. The caller saw that they suffice."""
        self.rows.enter(sequence, prefix)
        num_wanted = len(sequence.token_ids) - sequence.num_planned_tokens
        share = chunk_tokens(num_wanted, draft.num_left, others_wait)
        draft.shares[sequence] = share
        draft.num_left -= share
        draft.admissions[sequence] = sequence.num_planned_tokens
        draft.num_host_tokens += len(prefix.host) * self.spec.block_size

    def preempt(self, draft: StepDraft, victim: Sequence, reason: str) -> None:
        """Takes a sequence off the replica; if unanswered plans hold rows of it, it settles, else it may wait."""
        draft.drop(victim)
        num_blocks = len(victim.block_ids)
        mode = choose_mode(self._limits.preemption_mode, self.kv, self.rates)
        self.rows.evict(victim, mode)
        self.counters.preemptions[mode.value] += 1
        draft.evictions.append(Eviction(victim, reason, num_blocks, mode))

    def close_step(self, draft: StepDraft) -> StepPlan | None:
        """Makes the plan; None if no row has anything to compute."""
        draft.spread_rest()
        steady, num_steady = self.rows.steady, len(self.rows.steady)
        if num_steady + len(draft.shares) == 0:
            return None
        rows = steady.sequences + list(draft.shares)
        slots = steady.slots + [row.slot for row in draft.shares]
        starts = steady.starts + [row.num_planned_tokens for row in draft.shares]
        counts = [1] * num_steady + list(draft.shares.values())
        record = UnansweredPlan(
            step=self._next_step,
            rows=rows,
            starts=starts,
            counts=counts,
            num_to_sample=[1] * num_steady,
            num_steady=num_steady,
            num_tokens=num_steady + sum(draft.shares.values()),
        )
        record.edge_rows = [row.steady_row for row in draft.appends if row.steady_row is not None]
        record.final_rows = [row.steady_row for row in draft.finals if row.steady_row is not None]
        copies = self.kv.take_copies()
        record.num_copies = copies.num_blocks
        plan = StepPlan(
            incarnation=self.spec.incarnation,
            step=self._next_step,
            released_slots=self.rows.released_slots,
            admissions=[_admission(sequence, cached) for sequence, cached in draft.admissions.items()],
            append_slots=[row.slot for row in draft.appends],
            append_counts=[1] * len(draft.appends),
            append_block_ids=list(draft.appends.values()),
            row_slots=slots,
            row_starts=starts,
            row_counts=counts,
            demote_device_ids=copies.demote_device_ids,
            demote_host_ids=copies.demote_host_ids,
            promote_host_ids=copies.promote_host_ids,
            promote_device_ids=copies.promote_device_ids,
        )
        self._advance(draft, record)
        self.rows.load_tokens = None
        self.rows.unanswered.append(record)
        self.rows.released_slots = []
        self._next_step += 1
        return plan

    def _advance(self, draft: StepDraft, record: UnansweredPlan) -> None:
        """Rows move on as if the step were done; those that will have one token to compute become steady."""
        for sequence in draft.finals:
            sequence.num_planned_tokens = self.rows.steady.leave(sequence) + 1
        self.rows.steady.advance()
        for sequence, share in draft.shares.items():
            sequence.num_planned_tokens += share
            num_known = len(sequence.token_ids)
            samples = sequence.num_planned_tokens == num_known
            if samples:
                self.rows.fill_up(sequence)
                if num_known + 1 < self.rows.end_of(sequence):
                    self.rows.steady.join(sequence, num_known, self.rows.end_of(sequence))
                else:
                    record.final_rows.append(len(record.num_to_sample))
            record.num_to_sample.append(1 if samples else 0)

    def _grow(self, draft: StepDraft, sequence: Sequence) -> bool:
        """Gets a steady row its next block, whoever has to leave for it; False if the row does not run in this step."""
        if len(sequence.block_ids) == self.spec.num_device_blocks:
            self._outgrow(draft, sequence)
            return False
        block = self.kv.grow(sequence)
        while block is None:
            victim = self.rows.running[0]
            self.growth.note_preemption()
            self.preempt(draft, victim, f"no free KV block for sequence {sequence.sequence_id}")
            if victim is sequence:
                return False
            block = self.kv.grow(sequence)
        draft.appends[sequence] = block
        return True

    def _outgrow(self, draft: StepDraft, sequence: Sequence) -> None:
        """Ends a sequence that no preemption can make room for, once the tokens it sampled are known."""
        sequence.num_planned_tokens = self.rows.steady.leave(sequence)
        for plan in reversed(self.rows.unanswered):
            if plan.row_of(sequence) is not None:
                plan.last_of.append(sequence)
                return
        self.rows.end(sequence, sequence.num_planned_tokens)
        draft.outgrown.append(sequence)

    # Taking its answer -------------------------------------------------------------------------------------------

    def predict_step_ns(self, token_ns: float) -> float:
        """About how long the oldest unanswered plan takes; by `token_ns` a token while no step is measured."""
        num_tokens = self.rows.unanswered[0].num_tokens if self.rows.unanswered else 0
        measured = self.rates.predict_ns(num_tokens)
        return num_tokens * token_ns if measured is None else measured

    def complete(self, result: StepResult) -> Answer:
        """Takes the answer to the oldest unanswered plan. Raises ResultMismatch, changing nothing, if it is none."""
        if result.incarnation != self.spec.incarnation or not self.rows.unanswered:
            raise ResultMismatch(
                f"replica {self.spec.name!r} has incarnation {self.spec.incarnation} and {len(self.rows.unanswered)} "
                f"unanswered plans; the result is of incarnation {result.incarnation}, step {result.step}"
            )
        plan = self.rows.unanswered[0]
        plan.check(result)
        self.rows.unanswered.popleft()
        self.rows.load_tokens = None
        self.counters.note_step(plan.num_tokens, len(result.token_ids))
        if result.copy_ns * _MANY_COPIES <= result.duration_ns:
            self.rates.note(len(plan.rows), plan.num_tokens, result.duration_ns)
        if plan.num_copies and result.copy_ns:
            self.rates.note_copies(plan.num_copies, result.copy_ns)
            self.kv.copies_pay = copies_pay(self._limits.preemption_mode, self.spec.block_size, self.rates)
        answer = take_answer(self.rows, plan, result)
        for sequence, reason in answer.finished:
            self.growth.note_end(sequence.num_output_tokens, reason)
        return answer

    def end_early(self, sequence: Sequence) -> None:
        """Ends a sequence that runs or settles here, for a reason from outside."""
        self.rows.end_early(sequence)
        self.growth.note_end(sequence.num_output_tokens, None)


def _admission(sequence: Sequence, num_computed_tokens: int) -> Admission:
    request = sequence.request
    return Admission(
        slot=sequence.slot,
        sequence_id=request.sequence_id,
        token_ids=sequence.token_ids[:],
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        block_ids=tuple(sequence.block_ids),
        sampling=request.sampling,
        router_id=request.router_id,
        stream_key=request.stream_key,
        attempt=request.attempt,
        adapter=request.adapter,
    )
