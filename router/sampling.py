"""What a client may ask of sampling, checked once, and resolved to complete parameters.

Pure: no randomness (the caller draws a seed for a request that has none), no tokenizer, no files. `check_sampling` is
the whole rule book for ranges; what it returns needs no further check below. Every refusal names field, value and
limit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from router.errors import InvalidRequest
from router.sampling_rules import NUMBER_RULES, check_flag, check_logit_bias, check_stop, check_stop_token_ids

DEFAULT_COMPLETION_TOKENS = 16

_NEUTRAL: Mapping[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "n": 1,
    "logprobs": None,
    "prompt_logprobs": None,
}
"""Numbers for what neither a request nor generation_config.json says."""


@dataclass(frozen=True)
class SamplingRequest:
    """What the client said, field by field; None is "not said". Types are checked here, not trusted."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | Mapping[int, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    best_of: int | None = None
    """Sequences of which the n likeliest are the answer; n when absent."""
    logprobs: int | None = None
    """How many alternatives to report beside each generated token; 0 reports the token alone."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens."""
    echo: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None


@dataclass(frozen=True)
class ModelLimits:
    """What the model and its KV pool allow. Counts of tokens."""

    vocab_size: int
    max_model_len: int
    pool_tokens: int | None = None
    """Tokens the whole KV pool holds; None when it is not known."""


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for what a request leaves unsaid: generation_config.json where it speaks, else neutral."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> SamplingDefaults:
        """Take the sampling fields of a generation_config.json. Raises `InvalidRequest` naming a field out of range.

        `top_k` -1 is an older spelling of "off". `do_sample` and lengths are not sampling defaults and have no effect.
        """
        said = {f.name: config[f.name] for f in fields(cls) if config.get(f.name) is not None}
        if said.get("top_k") == -1:
            said["top_k"] = 0
        for name, value in said.items():
            said[name] = NUMBER_RULES[name].check(f"generation_config.json {name}", value)
        return cls(**said)

    def differing(self) -> dict[str, float]:
        """The fields that generation_config.json changed, for the line printed at start."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}


@dataclass(frozen=True)
class SamplingParams:
    """Resolved and complete: nothing is optional but what may be absent from a result."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    n: int
    best_of: int
    """Sequences that are run; the n of the highest summed logprob are the answer."""
    ignore_eos: bool
    echo: bool
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    logprobs: int | None
    prompt_logprobs: int | None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, bias), by rising id."""

    def seed_of(self, choice: int) -> int:
        """The seed of choice `choice` of n."""
        return choice_seed(self.seed, choice)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one choice of n: the request's own for choice 0, else a hash of both (signed 64 bit)."""
    if choice == 0:
        return seed
    data = seed.to_bytes(8, "little", signed=True) + choice.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def check_sampling(
    request: SamplingRequest,
    limits: ModelLimits,
    defaults: SamplingDefaults,
    *,
    prompt_tokens: int,
    is_chat: bool,
    drawn_seed: int,
) -> SamplingParams:
    """Check and resolve. `drawn_seed` serves a request without a seed. Raises `InvalidRequest` naming the field."""
    said = {
        name: rule.check(name, value)
        for name, rule in NUMBER_RULES.items()
        if (value := getattr(request, name)) is not None
    }
    max_tokens = _resolve_max_tokens(said.get("max_tokens"), limits, prompt_tokens, is_chat=is_chat)
    numbers = {**_NEUTRAL, **vars(defaults), "seed": drawn_seed, **said}
    min_tokens, n = numbers["min_tokens"], numbers["n"]
    if min_tokens > max_tokens:
        raise InvalidRequest("min_tokens", f"min_tokens must be at most max_tokens ({max_tokens}), got {min_tokens}")
    best_of = said.get("best_of", n)
    if best_of < n:
        raise InvalidRequest("best_of", f"best_of must be at least n ({n}), got {best_of}")
    echo = check_flag("echo", request.echo, default=False)
    if echo and is_chat:
        raise InvalidRequest("echo", "echo must be false for chat, got true; completions can echo their prompt")
    return SamplingParams(
        **{**numbers, "max_tokens": max_tokens, "best_of": best_of},
        ignore_eos=check_flag("ignore_eos", request.ignore_eos, default=False),
        echo=echo,
        skip_special_tokens=check_flag("skip_special_tokens", request.skip_special_tokens, default=True),
        include_stop_str_in_output=check_flag(
            "include_stop_str_in_output", request.include_stop_str_in_output, default=False
        ),
        stop=check_stop(request.stop),
        stop_token_ids=check_stop_token_ids(request.stop_token_ids, limits.vocab_size),
        logit_bias=check_logit_bias(request.logit_bias, limits.vocab_size),
    )


def chat_logprobs(logprobs: object, top_logprobs: object) -> int | None:
    """OpenAI's chat pair as one count of alternatives: None without `logprobs`, else `top_logprobs` (0 when absent)."""
    wanted = check_flag("logprobs", logprobs, default=False)
    if top_logprobs is None:
        return 0 if wanted else None
    count: int = NUMBER_RULES["logprobs"].check("top_logprobs", top_logprobs)
    if count and not wanted:
        raise InvalidRequest("top_logprobs", f"top_logprobs {count} needs logprobs to be true")
    return count if wanted else None


def _resolve_max_tokens(asked: int | None, limits: ModelLimits, prompt_tokens: int, *, is_chat: bool) -> int:
    """The number of tokens to generate at most; every number that does not fit is in the refusal."""
    context = limits.max_model_len
    if prompt_tokens + 1 > context:
        raise InvalidRequest(
            "prompt",
            f"prompt has {prompt_tokens} tokens and leaves no room for one more in the context of {context} tokens; "
            "shorten the prompt",
        )
    if limits.pool_tokens is not None and prompt_tokens + 1 > limits.pool_tokens:
        raise InvalidRequest(
            "prompt",
            f"prompt has {prompt_tokens} tokens and needs room for one more, but the KV cache holds "
            f"{limits.pool_tokens} tokens in all; shorten the prompt or start with a larger --kv-cache-memory",
        )
    remaining = context - prompt_tokens
    if asked is None:
        return remaining if is_chat else min(DEFAULT_COMPLETION_TOKENS, remaining)
    if asked > remaining:
        raise InvalidRequest(
            "max_tokens",
            f"max_tokens {asked} plus {prompt_tokens} prompt tokens exceeds the context of {context} tokens; "
            f"ask for at most {remaining} or shorten the prompt",
        )
    return asked
