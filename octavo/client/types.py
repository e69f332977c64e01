"""What the client takes and returns, as plain typed data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]


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
    best_of: int
    structured_output: Mapping[str, Any]
    """One of json_schema (a mapping), json_object (True), regex, choice (a list of texts) and grammar."""
    logprobs: int
    prompt_logprobs: int
    include_special_tokens: bool
    include_stop_string: bool
    truncate_prompt_tokens: int
    add_special_tokens: bool
    request_id: str
    priority: int
    cache_salt: str
    adapter: str
    user: str


class GenerateOptions(Options, total=False):
    """What `generate` takes beside."""

    echo: bool


class ChatOptions(Options, total=False):
    """What `chat` takes beside."""

    tools: Sequence[Mapping[str, Any]]
    """In OpenAI's form: {"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}."""
    tool_choice: str | Mapping[str, Any]
    """"auto", "none", "required", or {"type": "function", "function": {"name": …}}."""
    parallel_tool_calls: bool
    hide_reasoning: bool
    add_generation_prompt: bool
    continue_final_message: bool
    template_variables: Mapping[str, Any]
    documents: Sequence[Any]


@dataclass(frozen=True)
class ToolCall:
    """A call of a function. In deltas, `id` and `name` come with a call's first, and `arguments` is what is new."""

    index: int
    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


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
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()


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
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> dict[str, Any]:
        """The turn to append to the conversation, before the results of its tool calls."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        return {"role": "assistant", "content": self.text, **({"tool_calls": calls} if calls else {})}


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
    """A served model, or an alias of several."""

    name: str
    max_model_len: int
    vocab_size: int
    ready: bool
    weights: Mapping[str, float] = field(default_factory=dict)
    """Of an alias, the models that it stands for by weight; empty for a model."""


@dataclass(frozen=True)
class Tokens:
    """The ids that a prompt would run as, and the text of each alone."""

    token_ids: tuple[int, ...]
    texts: tuple[str, ...]
    max_model_len: int
