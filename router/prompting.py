"""From what a request asks to token ids, and to how its answers are read: everything that needs the model's text.

Takes long for most prompts: all but those that `is_quick` run in a thread. Pure otherwise. Knows no surface and no
scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from router.errors import InvalidRequest, show_value
from router.replies.output import ReplySpec
from router.replies.tools import read_tool_use
from router.requests import ChatPrompt, GenerationRequest
from router.sampling_rules import check_flag
from router.structured.spec import GrammarSpec, Thinking
from router.text.model_text import ModelText
from router.text.prompt import Prompt, PromptBuilder

MAX_QUICK_IDS = 2048
"""So many ids are checked in the time that a thread takes to begin and to report."""


@dataclass(frozen=True)
class BuiltPrompt:
    """A prompt, and what its answers may and must be."""

    prompt: Prompt
    reply: ReplySpec | None = None
    grammar: GrammarSpec | None = None
    thinking: Thinking | None = None
    """What may come before the text that the grammar describes."""


def is_quick(request: GenerationRequest) -> bool:
    """Whether its prompt is built sooner than handed to a thread: a few token ids, of which nothing is encoded."""
    asked = request.prompt
    if isinstance(asked, ChatPrompt) or not isinstance(asked.value, (list, tuple)):
        return False
    return len(asked.value) <= MAX_QUICK_IDS and all(type(item) is int for item in asked.value)


def build_prompts(
    request: GenerationRequest, text: ModelText, *, vocab_size: int, max_model_len: int
) -> list[BuiltPrompt]:
    """All prompts of a request. Raises `InvalidRequest`; one bad prompt refuses them all."""
    builder = text.prompts(vocab_size=vocab_size, max_model_len=max_model_len)
    asked = request.prompt
    limit = _token_limit(request, max_model_len)
    if isinstance(asked, ChatPrompt):
        built = [_build_chat(asked, request.grammar, text, builder)]
    else:
        prompts = builder.completions(asked.value, add_special_tokens=asked.add_special_tokens)
        built = [BuiltPrompt(prompt, grammar=request.grammar) for prompt in prompts]
    return built if limit is None else [replace(one, prompt=_cut(one.prompt, limit)) for one in built]


def _build_chat(asked: ChatPrompt, grammar: GrammarSpec | None, text: ModelText, builder: PromptBuilder) -> BuiltPrompt:
    use = read_tool_use(asked.options.tools, asked.tool_choice, asked.parallel_tool_calls)
    if use.forced and grammar is not None:
        raise InvalidRequest(
            grammar.field, f"{grammar.field}: an answer that tool_choice holds to a tool call can have no other form"
        )
    # A tool that must not be called is not shown.
    options = asked.options if use.functions else replace(asked.options, tools=None)
    prompt = builder.chat(asked.messages, options, add_special_tokens=asked.add_special_tokens)
    grammar = text.replies.grammar(use, text.tokenizer.token_id) or grammar
    settings, thinking = text.replies, None
    prompt_text = prompt.text or ""
    continued_text = _last_text(asked.messages) if options.continue_final_message else ""
    if grammar is not None:
        thinking = settings.thinking(
            prompt_text, continued_text=continued_text, special_id=text.tokenizer.special_token_id
        )
        if thinking is None:  # what the answer may spell is its content
            settings = replace(settings, tags=None)
    reply = settings.spec(
        use,
        prompt_text,
        continued_text=continued_text,
        shows_reasoning=check_flag("include_reasoning", asked.include_reasoning, default=True),
    )
    return BuiltPrompt(prompt, reply, grammar, thinking)


def _last_text(messages: object) -> str:
    """The text of the last message, of messages that were checked."""
    last = messages[-1] if isinstance(messages, Sequence) else {}
    content = last.get("content") if isinstance(last, Mapping) else None
    if isinstance(content, str):
        return content
    parts = [part for part in content or () if isinstance(part, Mapping)]
    return str(parts[-1].get("text", "")) if parts else ""


def _token_limit(request: GenerationRequest, max_model_len: int) -> int | None:
    """The most tokens that `truncate_prompt_tokens` leaves of a prompt; None where nothing is cut."""
    name, value = "truncate_prompt_tokens", request.truncate_prompt_tokens
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not (value == -1 or 1 <= value < max_model_len):
        raise InvalidRequest(name, f"{name} must be -1 or in [1, {max_model_len - 1}], got {show_value(value)}")
    if value > 0:
        return value
    asked: object = request.sampling.max_tokens
    num_answer_tokens = asked if isinstance(asked, int) and 1 <= asked < max_model_len else 1
    return max_model_len - num_answer_tokens


def _cut(prompt: Prompt, limit: int) -> Prompt:
    return prompt if len(prompt.token_ids) <= limit else Prompt(prompt.token_ids[-limit:], None)
