"""What goes into the scheduler core and what comes out: requests, replicas, events, refusals.

Plain frozen data which mirrors the wire (`octavo.internal.v1`) without importing it. Knows nothing of queues, blocks or
steps; must not know protobuf, gRPC, clocks or text. Times are nanoseconds of the caller's monotonic clock. Work and its
results are in `plan.py`, load in `statistics.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scheduler_svc.core.limits import CoreLimits as CoreLimits
from scheduler_svc.core.limits import PreemptionMode


class FinishReason(enum.IntEnum):
    """Why a sequence is complete; values are those of the wire's FinishReason, of which 0 (it goes on) is left out."""

    END_TOKEN = 1
    """A token of the model's end set was sampled."""
    STOP_TOKEN = 2
    """A token which the request named was sampled."""
    LENGTH = 3
    """max_tokens, the context length or the whole KV pool was reached."""
    NUMERIC_ERROR = 4
    """The logits held NaN or infinity; the sequence fails alone."""
    GRAMMAR_ERROR = 5
    """The grammar allows no further token, or became too complex to follow; the sequence fails alone."""


@dataclass(frozen=True, slots=True)
class Request:
    """One attempt at one sequence. Fields are those of the wire's GenerateRequest, which documents them further."""

    sequence_id: int
    """Made by the caller, unique among the live sequences (a counter will do); never a client's choice."""
    model: str
    """Served name."""
    prompt_token_ids: Sequence[int]
    """At least one token id, each in [0, 2**32)."""
    max_tokens: int
    """Output tokens, prior ones included, at which the sequence ends with LENGTH. More than len(prior_token_ids)."""
    prior_token_ids: Sequence[int] = ()
    """Output tokens that the router holds from earlier attempts."""
    sampling: object = None
    """How tokens are chosen. Passed through to Admission, never looked at (max_tokens apart, which is given above)."""
    prompt_logprobs_start: int | None = None
    """First prompt position whose logprob is wanted; None: none is. Bounds prefix hits."""
    adapter: str = ""
    """LoRA adapter; keys the prefix cache."""
    tenant: str = ""
    """Who pays; keys the prefix cache."""
    cache_salt: str = ""
    """Narrows prefix sharing within the tenant; keys the prefix cache."""
    priority: int = 0
    """Smaller is served first; strictly smaller displaces running work."""
    deadline_ns: int | None = None
    """Nanoseconds from submission until the result is worthless: then the sequence ends. The earliest goes first among
    equals."""
    age_ns: int = 0
    """Nanoseconds since the router accepted the request; orders among equals."""
    group_id: str = ""
    """Common to the sequences of one request; empty: alone. Unique per router."""
    group_size: int = 1
    """Sequences in the group. Its first member reserves room for all, so that they are accepted or refused as one."""
    router_id: int = 0
    """The router that takes the tokens."""
    stream_key: int = 0
    """Names the sequence at that router."""
    attempt: int = 1
    """From 1. A later attempt bypasses queue limits."""
    crash_group_sizes: Sequence[int] = ()
    """rows_in_step of each earlier ReplicaLost."""
    queue_events: bool = False
    """Whether Queued events are wanted: on submission, and from `tick` when its place has changed."""
    request_id: str = ""
    """For logs. Not unique."""
    block_names: Mapping[tuple[str, int], Sequence[bytes]] | None = None
    """By (fingerprint, block size): names of its full blocks in the prefix cache, where its tokens are made up, in a
    replay. None: blocks are named by their tokens."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A replica as its worker's Hello describes it. Raises ValueError on sizes that cannot serve."""

    replica_id: int
    """Made by the caller, unique for each attachment (a worker that attaches again is another replica)."""
    name: str
    """For logs and receipts."""
    incarnation: int
    """Random number of the worker's start; plans and results carry it."""
    model: str
    """Served name."""
    fingerprint: str
    """Of architecture and weights; keys the prefix cache."""
    max_model_len: int
    """Longest sequence in tokens."""
    block_size: int
    """Tokens per KV block."""
    num_device_blocks: int
    """KV blocks on the device."""
    num_slots: int
    """Rows that can be live at once."""
    max_step_tokens: int
    """Most tokens in one step. Below num_slots, no more rows than this run."""
    num_host_blocks: int = 0
    """KV blocks in host memory; 0: no host tier."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "block_size", "num_device_blocks", "num_slots", "max_step_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"replica {self.name!r}: {name} is {getattr(self, name)}; it must be at least 1")
        if self.num_host_blocks < 0:
            raise ValueError(f"replica {self.name!r}: num_host_blocks is {self.num_host_blocks}; it must be at least 0")

    @property
    def num_cache_tokens(self) -> int:
        """Tokens that the device's KV blocks hold together."""
        return self.num_device_blocks * self.block_size


# Events ---------------------------------------------------------------------------------------------------------------
# Each names its sequence. After `submit` returned, exactly one of Finished or Ended comes, and nothing after it.


@dataclass(frozen=True, slots=True)
class Queued:
    """The sequence waits. Sent on submission and when its place has changed, if asked for."""

    sequence_id: int
    position: int
    """Waiting sequences of the same model before it."""
    eta_ns: int | None = None
    """Time until it starts, if starts go on as they did; None: none was seen yet."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The sequence entered a slot, for the first time or again."""

    sequence_id: int
    replica_id: int
    cached_tokens: int
    """Tokens found in the prefix cache."""
    recomputed_tokens: int
    """Tokens whose KV existed before (an earlier attempt's, or before a preemption) and is computed again."""
    queue_ns: int
    """Time since submission or preemption."""


@dataclass(frozen=True, slots=True)
class Preempted:
    """The sequence lost its slot and waits again."""

    sequence_id: int
    replica_id: int
    reason: str
    """Why, for people."""
    num_blocks: int
    """Blocks that it gave back."""
    mode: PreemptionMode = PreemptionMode.RECOMPUTE
    """What becomes of them: RECOMPUTE or SWAP."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the sequence is; sent now and then."""

    sequence_id: int
    num_output_tokens: int
    """Output tokens known, prior ones included."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence is complete. Terminal."""

    sequence_id: int
    num_output_tokens: int
    """Output tokens, prior ones included, an unlisted end or stop token not."""
    reason: FinishReason


class EndReason(enum.Enum):
    """Why an attempt ended without being complete."""

    CANCELLED = "cancelled"
    """`cancel` was called. Final."""
    REPLICA_LOST = "replica lost"
    """`detach` was called on its replica. Retriable; ABORTED with ReplicaLost as detail."""
    UNDELIVERED = "tokens not delivered"
    """The worker could not hand its tokens to the router. Retriable; ABORTED."""
    DEADLINE = "deadline passed"
    """Its deadline passed before it was complete. Final; DEADLINE_EXCEEDED."""


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """Detail of REPLICA_LOST."""

    replica_id: int
    rows_in_step: int
    """Distinct sequences in its unanswered plans, ended ones included; 0: this sequence was in none of them."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt is over without completing the sequence. Terminal."""

    sequence_id: int
    reason: EndReason
    replica_lost: ReplicaLost | None = None
    """Set with REPLICA_LOST."""


Event = Queued | Scheduled | Preempted | Progress | Finished | Ended


@dataclass(frozen=True, slots=True)
class Ticked:
    """What `Scheduler.tick` noticed."""

    events: Sequence[Event]
    """Ended(DEADLINE) of those whose deadline passed; Queued of those that asked and moved."""
    advice: Sequence[str]
    """Lines for the operator's log, each said once per occasion: what holds the load up and which setting changes it.
    """


# Errors ---------------------------------------------------------------------------------------------------------------
# Raised before anything changed.


class RefusalReason(enum.Enum):
    """Why a request was not accepted; the shell maps each to a gRPC status."""

    UNKNOWN_MODEL = "unknown model"
    """No replica ever served it. NOT_FOUND."""
    INVALID = "invalid"
    """A field is out of range. INVALID_ARGUMENT."""
    TOO_LONG = "too long"
    """Prompt + prior + 1 token exceed max_model_len or the KV pool of every replica seen. INVALID_ARGUMENT."""
    QUEUE_FULL = "queue full"
    """Too many sequences or tokens wait, in all or of its tenant. RESOURCE_EXHAUSTED with `retry_after_ns`."""
    DEADLINE = "deadline"
    """The backlog says that its first token would come after its deadline. DEADLINE_EXCEEDED."""
    POISON = "poison"
    """It crashed a replica twice while alone there. Final; INTERNAL."""


class Refused(Exception):
    """`submit` did not accept the request: `field`, `value` and `limit` say why, the message says it whole."""

    def __init__(
        self,
        reason: RefusalReason,
        field: str,
        value: object,
        limit: object,
        remedy: str,
        retry_after_ns: int | None = None,
    ) -> None:
        super().__init__(f"{reason.value}: {field} is {value}, the limit is {limit}; {remedy}")
        self.reason = reason
        self.field = field
        self.value = value
        self.limit = limit
        self.retry_after_ns = retry_after_ns
        """QUEUE_FULL: when there should be room, by the backlog and the pace of starts so far."""


class IllegalTransition(RuntimeError):
    """A call that the state machine does not allow: an id used twice, an unknown replica."""


class ResultMismatch(ValueError):
    """A step result that does not answer the oldest unanswered plan. Detach the replica and drop the connection."""
