"""One step's work for a replica and what came of it: the core's side of the step protocol.

Plain frozen data which mirrors the wire's StepPlan and StepResult field by field. Effects of a plan, in order: released
slots, admissions, appended blocks, demotions, promotions, then compute. Plans of a replica execute in order of `step`.
Nobody changes a list after it was handed over.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.types import Event, FinishReason


class Limit(enum.Enum):
    """What kept a step from being bigger."""

    NOTHING_WAITING = "nothing waiting"
    """All work there is is in the step, or rests on answers still to come."""
    TOKENS = "token budget"
    """max_step_tokens is spent."""
    SLOTS = "slots"
    """Every slot (or max_num_seqs) is taken while others wait."""
    BLOCKS = "blocks"
    """The next waiting sequences need more KV blocks than are free."""
    UNANSWERED_PLANS = "unanswered plans"
    """The replica holds as many plans as it may; `complete` one first."""
    PLACEMENT = "placement"
    """The waiting sequences suit another replica better, which has room for them."""
    LEADER = "computed by another"
    """The waiting sequences share blocks that running ones are about to compute."""
    PREFILL_CAP = "prefill cap"
    """More prompt tokens would hold the decoding sequences up for too long."""
    GROWTH = "room for growth"
    """Blocks are free, and kept for the sequences that run, which are thought to grow into them."""
    SUSPECTS = "suspects"
    """Sequences that may have crashed a replica run here in a small group, or wait for the rows to become few."""
    DRAINING = "draining"
    """The replica takes no new sequences."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence enters a slot. Everything about it is here, first time or resumed."""

    slot: int
    sequence_id: int
    """For the shell and for logs; not on the wire."""
    token_ids: Sequence[int]
    """Prompt, then output ids so far (an array of unsigned 32-bit integers)."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is in the first blocks already. A multiple of the block size, less than len(token_ids)."""
    block_ids: Sequence[int]
    """The block table, long enough for all of token_ids."""
    sampling: object
    """From the request, untouched."""
    router_id: int
    stream_key: int
    attempt: int
    adapter: str


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step's work. Lists are parallel as on the wire."""

    incarnation: int
    step: int
    """Counts from 1 for each attachment."""
    released_slots: Sequence[int]
    admissions: Sequence[Admission]
    append_slots: Sequence[int]
    append_counts: Sequence[int]
    append_block_ids: Sequence[int]
    row_slots: Sequence[int]
    """At least one row; each slot at most once."""
    row_starts: Sequence[int]
    """Tokens computed before this step, unanswered plans included."""
    row_counts: Sequence[int]
    """Tokens to compute. The row samples when start + count reaches its known tokens; a token which an unanswered plan
    samples counts as known."""
    demote_device_ids: Sequence[int] = ()
    """Blocks to copy to the host before anything is computed or promoted, ..."""
    demote_host_ids: Sequence[int] = ()
    """... and where to; each at most once."""
    promote_host_ids: Sequence[int] = ()
    """Blocks to copy to the device before anything is computed, ..."""
    promote_device_ids: Sequence[int] = ()
    """... and where to; each at most once."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What `Scheduler.plan` decided."""

    plan: StepPlan | None
    """None: nothing to send."""
    events: Sequence[Event]
    """Scheduled, Preempted, and Finished(LENGTH) of a sequence that outgrew the pool; may come without a plan."""
    limited_by: Limit
    """Why the plan is no bigger, or why there is none."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. Rows are the plan's rows, in the plan's order."""

    incarnation: int
    step: int
    num_sampled: Sequence[int]
    """Per row: tokens sampled; 0 for an inner chunk, for a row that had ended and for an unlisted end or stop token."""
    token_ids: Sequence[int]
    """The sampled ids, concatenated; end and stop tokens are not among them."""
    finishes: Mapping[int, FinishReason] = field(default_factory=dict)
    """Rows that ended in this step, by row index (the wire's finish_reasons without its zeros)."""
    undelivered_rows: Sequence[int] = ()
    """Rows whose tokens could not be handed to their router."""
    duration_ns: int = 0
    """Wall time of the step on the worker."""
    copy_ns: int = 0
    """Of that, or beside it: time that the plan's copies between the tiers took."""
