"""What goes into and comes out of one sequence's state machine, as frozen values.

Inputs are what the token path and the scheduler say; outputs are what the router must do or may show.
Knows no proto, socket or clock. Times are seconds on one monotonic clock. What is made for every token is a named
tuple: a frozen dataclass takes four times as long to make. Where nearly every token makes one it is made by `_make`, in
half the time of a call.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from router.errors import ErrorKind


class Finish(enum.Enum):
    """Why the worker ended a sequence; the values are those of octavo.internal.v1.FinishReason."""

    END_TOKEN = 1
    STOP_TOKEN = 2
    LENGTH = 3
    NUMERIC_ERROR = 4
    GRAMMAR_ERROR = 5


class TokenLogprob(NamedTuple):
    """A token's natural log probability and the likeliest alternatives as (id, logprob), best first.

    `token_id` is None where the reader knows the token by its position in the prompt.
    """

    token_id: int | None
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """What the state machine knows of its sequence.

    `prompt_logprob_positions` is the half-open range of prompt positions whose logprobs were asked for, or
    None. `endpoint` is this router's token endpoint, for messages.
    """

    stream_key: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    recovery_timeout_s: float
    endpoint: str
    wants_logprobs: bool = False
    prompt_logprob_positions: range | None = None


# Inputs from the token path.


class TokenDelta(NamedTuple):
    """New tokens from a worker; `position` counts prior tokens. `final_token_id` is the unlisted end or stop token.

    `entry_position` is where in the answer the worker took the sequence on: what is before it came another way.
    """

    stream_key: int
    attempt: int
    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: Finish | None = None
    final_token_id: int | None = None
    entry_position: int = 0


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """Logprobs of a stretch of the prompt, from position `start` on."""

    stream_key: int
    attempt: int
    start: int
    logprobs: tuple[TokenLogprob, ...]


# Inputs from the scheduler's call.


@dataclass(frozen=True, slots=True)
class Queued:
    """The attempt waits behind `position` others."""

    attempt: int
    position: int
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Scheduled:
    """The attempt entered a replica."""

    attempt: int
    replica: str
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    queue_s: float = 0.0
    numerics: str = ""
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class Preempted:
    """The attempt left its replica and waits again."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Output tokens that the scheduler knows of, prior ones included."""

    attempt: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The scheduler says that the sequence is complete, with so many listed output tokens."""

    attempt: int
    num_output_tokens: int
    finish: Finish


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The call is over. `failure` is None for OK; `crash_group_size` is ReplicaLost.rows_in_step, where given.

    `tokens_lost`: the replica lives, but what it sent was not delivered.
    """

    attempt: int
    retriable: bool = False
    failure: ErrorKind | None = None
    message: str = ""
    crash_group_size: int | None = None
    retry_after_s: float | None = None
    tokens_lost: bool = False


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether some replica of the model can produce a token now, as far as this router knows."""

    ready: bool


Input: TypeAlias = (
    TokenDelta | PromptDelta | Queued | Scheduled | Preempted | Progress | Finished | AttemptEnded | Availability
)


# Outputs.


@dataclass(frozen=True, slots=True)
class Submit:
    """Open this attempt and cancel the one before. `prompt_logprobs_start` is None when none are missing."""

    attempt: int
    prior_token_ids: tuple[int, ...]
    crash_group_sizes: tuple[int, ...]
    prompt_logprobs_start: int | None


class NewTokens(NamedTuple):
    """The next tokens of the answer, each exactly once and in order, from `position` on."""

    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True, slots=True)
class NewPromptLogprobs:
    """The next prompt logprobs, in order, from `start` on; all of them precede the first tokens."""

    start: int
    logprobs: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class QueueMoved:
    """The sequence waits behind `position` others."""

    position: int
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class ReceiptParts:
    """How the sequence was served, added up from the events of every attempt."""

    queue_s: float = 0.0
    first_queue_s: float | None = None
    """Of that, the time before the first admission; None before there was one."""
    cached_tokens: int | None = None
    recomputed_tokens: int = 0
    num_preemptions: int = 0
    num_attempts: int = 1
    replica: str = ""
    numerics: str = ""
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class Completed:
    """The end of a complete sequence. `final_token_id` is the end or stop token, None where there is none."""

    finish: Finish
    final_token_id: int | None
    num_tokens: int
    receipt: ReceiptParts = field(default_factory=ReceiptParts)

    @property
    def num_counted_tokens(self) -> int:
        """Tokens for usage: those listed, and the end or stop token."""
        return self.num_tokens + (self.finish in (Finish.END_TOKEN, Finish.STOP_TOKEN))


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of a sequence that cannot be completed."""

    kind: ErrorKind
    message: str
    retry_after_s: float | None = None
    by_grammar: bool = False
    """What the request holds its answer to is at fault, not its prompt."""


Output: TypeAlias = Submit | NewTokens | NewPromptLogprobs | QueueMoved | Completed | Failed
