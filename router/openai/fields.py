"""The fields of OpenAI's and vLLM's request bodies, by what this server does with them.

Three kinds: those that are read, those that are refused because leaving them unheard would change the answer, and those
that change nothing here. A field of none of them is unknown: it has no effect, and the response's
`x-octavo-ignored-fields` header names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from router.errors import InvalidRequest
from router.structured.fields import GRAMMAR_FIELDS

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "max_tokens",
    "min_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "n",
    "best_of",
    "prompt_logprobs",
    "echo",
    "skip_special_tokens",
    "include_stop_str_in_output",
)
_COMMON = frozenset(
    (
        *SAMPLING_FIELDS,
        "model",
        "stream",
        "stream_options",
        "priority",
        "cache_salt",
        "request_id",
        "adapter",
        "user",
        "logprobs",
        "add_special_tokens",
        "truncate_prompt_tokens",
        "spaces_between_special_tokens",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "return_metrics",
        *GRAMMAR_FIELDS,
    )
)
COMPLETION_FIELDS = _COMMON | {"prompt"}
CHAT_FIELDS = _COMMON | {
    "messages",
    "top_logprobs",
    "max_completion_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
    "documents",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "include_reasoning",
    "reasoning_effort",
    "verbosity",
    "modalities",
}

_WITHOUT_EFFECT = frozenset(
    {"safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "metadata"}
)
"""They tell a provider who asks, where to route and how long to cache; nothing here depends on them."""

_REFUSED: Mapping[str, str] = {
    "suffix": "this server completes a prompt at its end only; leave it out",
    "functions": "use tools, which replaced it",
    "function_call": "use tool_choice, which replaced it",
    "audio": "this server makes text only; leave it out",
    "prediction": "predicted output is not supported; leave it out",
    "web_search_options": "this server searches nothing; leave it out",
    "moderation": "this server moderates nothing; leave it out",
    "store": "answers are not stored; leave it out",
    "use_beam_search": "beam search is not supported; use best_of",
    "length_penalty": "it belongs to beam search, which is not supported; leave it out",
    "early_stopping": "it belongs to beam search, which is not supported; leave it out",
    "prompt_embeds": "prompts are text or token ids; leave it out",
    "chat_template": "templates come from the model's files, not from requests; leave it out",
    "logits_processors": "code from requests is not run; leave it out",
    "bad_words": "words of several tokens cannot be banned; ban single tokens by logit_bias -100",
    "allowed_token_ids": "sampling cannot be held to a list of ids; use structured_outputs, or logit_bias",
    "mm_processor_kwargs": "the model takes text only; leave it out",
    "kv_transfer_params": "blocks are not handed between servers; leave it out",
    "vllm_xargs": "they are hooks into vLLM; leave it out",
}
_ASKS_NOTHING: tuple[Any, ...] = (False, [], {}, "")
_ASKS_NOTHING_AS: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1,),
    "function_call": ("none", "auto"),  # of functions, which are refused themselves
    "web_search_options": (False,),  # an empty object asks for a search with every default
}
_SHOWN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_SHOWN_NAMES = 16


def given_fields(body: Mapping[str, Any], known: frozenset[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(the fields that say something, names of unknown ones). null is the same as absent.

    Raises `InvalidRequest` for a refused field, unless its value asks for nothing.
    """
    given = {name: value for name, value in body.items() if value is not None}
    for name in given.keys() & _REFUSED.keys():
        if given[name] not in _ASKS_NOTHING_AS.get(name, _ASKS_NOTHING):
            raise InvalidRequest(name, f"{name} is not supported: {_REFUSED[name]}")
    if given.get("service_tier", "auto") not in ("auto", "default"):
        raise InvalidRequest("service_tier", "service_tier must be 'auto' or left out: requests stand by priority here")
    heard = known | _REFUSED.keys() | _WITHOUT_EFFECT | {"service_tier"}
    unknown = [name for name in given if name not in heard]
    return given, tuple(name for name in unknown[:_MAX_SHOWN_NAMES] if _SHOWN_NAME.fullmatch(name))
