"""What the client takes and returns, as plain typed data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict

FinishReason: TypeAlias = Literal["stop", "length"]


class Options(TypedDict, total=False):
    """Everything a request may say beside its prompt; what is left out takes the server's default.

    The fields are those of octavo.v1.SamplingParams, OutputOptions and RequestOptions, where their ranges stand.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    include_special_tokens: bool
    request_id: str
    priority: int
    cache_salt: str
    adapter: str


@dataclass(frozen=True)
class TokenLogprob:
    """A token with the natural log of its probability, and the likeliest alternatives, best first."""

    token_id: int
    text: str
    raw: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Delta:
    """More text of one choice, and the tokens behind it from position `start_index` of the output."""

    text: str
    index: int = 0
    start_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class QueuePosition:
    """The request waits behind `position` others."""

    position: int
    eta_seconds: float | None


@dataclass(frozen=True)
class Receipt:
    """How one choice was served."""

    queue_seconds: float
    cached_tokens: int
    recomputed_tokens: int
    preemptions: int
    attempts: int
    replica: str
    numerics: str
    batch_invariant: bool
    seed: int


@dataclass(frozen=True)
class Usage:
    """Token counts of the whole request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class Choice:
    """One complete answer. `stop_string` or `stop_token_id` say which of the request's own stops ended it."""

    text: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    receipt: Receipt


@dataclass(frozen=True)
class Result:
    """A complete answer. `prompt_logprobs` begins with the prompt's second token; empty unless asked for."""

    request_id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True)
class Model:
    """A served model."""

    name: str
    max_model_len: int
    vocab_size: int
    ready: bool
