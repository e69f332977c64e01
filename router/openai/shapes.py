"""Pieces of OpenAI's JSON answers that chat and completions share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.errors import InvalidRequest, RouterError
from router.replies.types import ToolCallDelta
from router.requests import ChoiceEnd, PromptInfo, TokenInfo, Usage

Json = dict[str, Any]


def usage_json(usage: Usage) -> Json:
    """Token counts, cached ones as OpenAI nests them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def usage_so_far_json(num_prompt_tokens: int, num_completion_tokens: int) -> Json:
    """Token counts of an answer that goes on."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


def metrics_json(end: ChoiceEnd) -> Json:
    """How a choice was served; an addition to OpenAI's form."""
    receipt = end.receipt
    return {
        "queue_seconds": receipt.queue_s,
        "cached_tokens": receipt.cached_tokens or 0,
        "recomputed_tokens": receipt.recomputed_tokens,
        "preemptions": receipt.num_preemptions,
        "attempts": receipt.num_attempts,
        "replica": receipt.replica,
        "numerics": receipt.numerics,
        "batch_invariant": receipt.batch_invariant,
        "seed": end.seed,
    }


def tool_call_json(call: ToolCallDelta) -> Json:
    """A whole tool call, or the first delta of one."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def tool_delta_json(call: ToolCallDelta) -> Json:
    """A delta of a tool call."""
    if call.name:
        return {"index": call.index, **tool_call_json(call)}
    return {"index": call.index, "function": {"arguments": call.arguments}}


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


def token_name(info: TokenInfo, *, as_id: bool = False) -> str:
    """A token's text, or its bytes spelled out where they are no text of their own, as OpenAI's completions do.

    With `as_id` its id, as vLLM writes it where that is asked for.
    """
    if as_id:
        return f"token_id:{info.token_id}"
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
