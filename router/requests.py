"""A request and its answer in the one shape that both surfaces share, so that gRPC and HTTP cannot drift apart.

Plain frozen data: what a client asked, and the events that answer it. Knows no protocol. Field names in errors are
those of `SamplingRequest` and of this file; both surfaces spell them the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from octavo.tool_calls import join_calls
from router.replies.types import ToolCallDelta
from router.sampling import SamplingRequest
from router.streams.types import ReceiptParts
from router.structured.spec import GrammarSpec
from router.text.prompt import ChatOptions

MAX_REQUEST_ID_CHARS = 128
_REQUEST_ID_REFUSED = re.compile(r"[^A-Za-z0-9._-]")


@dataclass(frozen=True)
class CompletionPrompt:
    """Text, token ids, or a list of either, as the client sent it, not checked yet."""

    value: object
    add_special_tokens: bool = True


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation for the chat template; messages are as the client sent them, not checked yet."""

    messages: object
    options: ChatOptions = field(default_factory=ChatOptions)
    tool_choice: object = None
    parallel_tool_calls: object = None
    include_reasoning: object = None
    add_special_tokens: bool = False


@dataclass(frozen=True)
class RequestOptions:
    """Where a request stands among others, and what it is called."""

    model: str = ""
    request_id: str = ""
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""
    user: str = ""
    """Who asks, in the client's own words."""
    tenant: str = ""
    """Who asks; empty for the one tenant of a router without keys. Set from the key, never by a client."""
    queue_events: bool = False
    deadline_s: float | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt, or several completion prompts, to answer n times each."""

    prompt: CompletionPrompt | ChatPrompt
    sampling: SamplingRequest = field(default_factory=SamplingRequest)
    options: RequestOptions = field(default_factory=RequestOptions)
    truncate_prompt_tokens: object = None
    """Keep the last so many tokens of the prompt; -1: as many as leave room for the answer."""
    grammar: GrammarSpec | None = None
    """What the answer must be; None leaves it free. From `router.structured`, which knows the fields that say it."""


class TokenInfo(NamedTuple):
    """A token as answers report it. `logprob` is None for the first token of a prompt."""

    token_id: int
    raw: bytes
    logprob: float | None
    top: tuple[TokenInfo, ...] = ()

    @property
    def text(self) -> str:
        """The token's text, U+FFFD where it is not complete UTF-8."""
        return self.raw.decode("utf-8", "replace")


class TextDelta(NamedTuple):
    """More text of one choice, and the tokens behind it from position `start_index` of the output.

    A chat's answer may also gain thinking and tool calls; `text` is its content alone.
    """

    index: int  # type: ignore[assignment]  # which tuple.index gives way to
    text: str
    start_index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenInfo, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """Log probabilities of a stretch of the prompt."""

    start_index: int
    tokens: tuple[TokenInfo, ...]


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """The request waits behind `position` others."""

    position: int
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class ChoiceEnd:
    """One choice is complete. `finish_reason` is stop, length or tool_calls; at most one of the stops is set."""

    index: int
    finish_reason: str
    completion_tokens: int
    receipt: ReceiptParts
    seed: int
    stop_string: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of the whole request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


Event: TypeAlias = TextDelta | PromptInfo | QueueInfo | ChoiceEnd | Usage


@dataclass(frozen=True)
class Answer:
    """All events of one request, put together."""

    texts: Mapping[int, TextDelta]
    ends: Mapping[int, ChoiceEnd]
    usage: Usage
    prompt: PromptInfo | None


class AnswerBuilder:
    """Joins events into an answer."""

    def __init__(self) -> None:
        self._deltas: dict[int, list[TextDelta]] = {}
        self._ends: dict[int, ChoiceEnd] = {}
        self._prompt: list[PromptInfo] = []
        self._usage = Usage()

    def add(self, event: Event) -> None:
        match event:
            case TextDelta():
                self._deltas.setdefault(event.index, []).append(event)
            case ChoiceEnd():
                self._ends[event.index] = event
            case PromptInfo():
                self._prompt.append(event)
            case Usage():
                self._usage = event
            case QueueInfo():
                pass

    def build(self) -> Answer:
        texts = {index: _join(index, self._deltas.get(index, [])) for index in self._ends}
        prompt = None
        if self._prompt:
            tokens = tuple(token for part in self._prompt for token in part.tokens)
            prompt = PromptInfo(self._prompt[0].start_index, tokens)
        return Answer(texts, self._ends, self._usage, prompt)


def _join(index: int, deltas: Sequence[TextDelta]) -> TextDelta:
    return TextDelta(
        index,
        "".join(delta.text for delta in deltas),
        0,
        tuple(token_id for delta in deltas for token_id in delta.token_ids),
        tuple(token for delta in deltas for token in delta.logprobs),
        "".join(delta.reasoning for delta in deltas),
        join_calls(call for delta in deltas for call in delta.tool_calls),
    )


def clean_request_id(text: str) -> str:
    """A client's request id as it is echoed: at most 128 characters of [A-Za-z0-9._-], others left out."""
    return _REQUEST_ID_REFUSED.sub("", text[: 4 * MAX_REQUEST_ID_CHARS])[:MAX_REQUEST_ID_CHARS]
