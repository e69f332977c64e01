"""The request bodies of OpenAI's endpoints as JSON schemas, for the description that the server gives of itself.

They say what may be sent, for people and programs that read /openapi.json; what is taken is decided by `schema` and
the checks behind it alone, and a test holds these names to theirs.
"""

from __future__ import annotations

from typing import Any

from octavo.integers import INT32_MAX
from router.access.key_file import PRIORITY_MAX, PRIORITY_MIN
from router.sampling_rules import BIAS_RULE, NUMBER_RULES, NumberRule

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_OBJECT: Schema = {"type": "object"}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": INT32_MAX}
_IDS: Schema = {"type": "array", "items": _TOKEN_ID}


def _integer(minimum: int, maximum: int = INT32_MAX) -> Schema:
    return {"type": "integer", "minimum": minimum, "maximum": maximum}


def _ruled(rule: NumberRule) -> Schema:
    low = "exclusiveMinimum" if rule.open_low else "minimum"
    return {"type": "integer" if rule.integer else "number", low: rule.low, "maximum": rule.high}


_COMMON: dict[str, Schema] = {
    "model": _TEXT,
    "stream": _FLAG,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _FLAG, "continuous_usage_stats": _FLAG},
    },
    **{name: _ruled(rule) for name, rule in NUMBER_RULES.items() if name != "logprobs"},
    "logit_bias": {"type": "object", "additionalProperties": _ruled(BIAS_RULE)},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT}]},
    "stop_token_ids": _IDS,
    "ignore_eos": _FLAG,
    "skip_special_tokens": _FLAG,
    "spaces_between_special_tokens": _FLAG,
    "include_stop_str_in_output": _FLAG,
    "add_special_tokens": _FLAG,
    "truncate_prompt_tokens": _integer(-1),
    "return_token_ids": _FLAG,
    "return_tokens_as_token_ids": _FLAG,
    "return_metrics": _FLAG,
    "priority": _integer(PRIORITY_MIN, PRIORITY_MAX),
    "cache_salt": _TEXT,
    "request_id": _TEXT,
    "user": _TEXT,
    "response_format": {
        "type": "object",
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "properties": {"name": _TEXT, "schema": _OBJECT, "strict": _FLAG}},
        },
        "required": ["type"],
    },
    "structured_outputs": _OBJECT,
}
_PART: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": _TEXT},
    "required": ["type", "text"],
}
_MESSAGE: Schema = {
    "type": "object",
    "properties": {
        "role": {"enum": ["developer", "system", "user", "assistant", "tool"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART}, {"type": "null"}]},
        "tool_calls": {"type": "array", "items": _OBJECT},
        "tool_call_id": _TEXT,
    },
    "required": ["role"],
}
_MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1}
_TOOLS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"type": {"enum": ["function"]}, "function": _OBJECT},
        "required": ["type", "function"],
    },
}
_PROMPT: Schema = {"anyOf": [_TEXT, _IDS, {"type": "array", "items": _TEXT}, {"type": "array", "items": _IDS}]}


def _body(required: list[str], **properties: Schema) -> Schema:
    schema = {"type": "object", "properties": properties, "required": required}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


COMPLETION_BODY = _body(["prompt"], prompt=_PROMPT, echo=_FLAG, logprobs=_ruled(NUMBER_RULES["logprobs"]), **_COMMON)
"""For FastAPI's `openapi_extra`, as all of these."""

CHAT_BODY = _body(
    ["messages"],
    messages=_MESSAGES,
    logprobs=_FLAG,
    top_logprobs=_ruled(NUMBER_RULES["logprobs"]),
    max_completion_tokens=_ruled(NUMBER_RULES["max_tokens"]),
    add_generation_prompt=_FLAG,
    continue_final_message=_FLAG,
    chat_template_kwargs=_OBJECT,
    documents={"type": "array", "items": _OBJECT},
    tools=_TOOLS,
    tool_choice={"anyOf": [{"enum": ["auto", "none", "required"]}, _OBJECT]},
    parallel_tool_calls=_FLAG,
    include_reasoning=_FLAG,
    **_COMMON,
)
TOKENIZE_BODY = _body(
    [], model=_TEXT, prompt=_TEXT, messages=_MESSAGES, add_special_tokens=_FLAG, return_token_strs=_FLAG, tools=_TOOLS
)
DETOKENIZE_BODY = _body(["tokens"], model=_TEXT, tokens=_IDS, skip_special_tokens=_FLAG)
