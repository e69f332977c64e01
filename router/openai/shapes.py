"""Pieces of OpenAI's JSON answers that chat and completions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.errors import InvalidRequest, RouterError
from router.requests import PromptInfo, TokenInfo, Usage

Json = dict[str, Any]


def usage_json(usage: Usage) -> Json:
    """Token counts, cached ones as OpenAI nests them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_json(error: RouterError) -> Json:
    """OpenAI's error body."""
    codes = error.codes
    return {
        "error": {
            "message": error.message,
            "type": codes.openai_type,
            "param": error.field if isinstance(error, InvalidRequest) else None,
            "code": codes.http_status,
        }
    }


def stop_reason(stop_string: str | None, stop_token_id: int | None) -> str | int | None:
    """What stopped a choice, as vLLM reports it."""
    return stop_string if stop_string is not None else stop_token_id


def prompt_logprobs_json(prompt: PromptInfo) -> list[Json | None]:
    """vLLM's form: for each prompt token a table of ids, the token itself first; null for the first token."""
    return [None] * prompt.start_index + [_table(info) for info in prompt.tokens]


def _table(info: TokenInfo) -> Json:
    table = {str(info.token_id): {"logprob": info.logprob, "decoded_token": info.text}}
    for other in info.top:
        table.setdefault(str(other.token_id), {"logprob": other.logprob, "decoded_token": other.text})
    return table


def token_name(info: TokenInfo) -> str:
    """A token's text, or its bytes spelled out where they are no text of their own, as OpenAI's completions do."""
    try:
        return info.raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in info.raw)


def echoed_tokens(prompt_ids: Sequence[int], raw: Sequence[bytes], found: PromptInfo | None) -> tuple[TokenInfo, ...]:
    """A prompt's tokens with their logprobs; the first has none."""
    known = {} if found is None else {found.start_index + i: info for i, info in enumerate(found.tokens)}
    return tuple(
        known.get(position, TokenInfo(token_id, data, None))
        for position, (token_id, data) in enumerate(zip(prompt_ids, raw, strict=True))
    )
