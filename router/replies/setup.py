"""How the answers of one model are read: chosen at start by options or by its template, then fitted to each request.

Knows formats, tags and tools; knows no tokens and no surface.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from router.errors import InvalidRequest
from router.replies.formats import FORMATS, HERMES, LLAMA3, MISTRAL, CallFormat, detect_format
from router.replies.output import ReplySpec
from router.replies.reasoning import REASONING_TAGS, ReasoningTags, detect_tags, opens_inside
from router.replies.tools import ToolUse
from router.structured.spec import GrammarSpec, Thinking
from router.structured.tools import ToolFormat, spec_for_tools


@dataclass(frozen=True)
class ReplySettings:
    """How one model writes tool calls and thinking; None where it does neither, as far as is known."""

    call_format: CallFormat | None = None
    tags: ReasoningTags | None = None

    @classmethod
    def choose(cls, template_source: str, tool_call_parser: str, reasoning_parser: str) -> ReplySettings:
        """By the options' names; "auto" asks the template."""
        detected = detect_format(template_source) if tool_call_parser == "auto" else FORMATS[tool_call_parser]
        if reasoning_parser == "auto":
            return cls(detected, detect_tags(template_source))
        return cls(detected, REASONING_TAGS.get(reasoning_parser))

    def spec(self, use: ToolUse, prompt_text: str, *, continued_text: str, shows_reasoning: bool) -> ReplySpec | None:
        """What to look for in the answers to this prompt; None where all text is content.

        `continued_text` is what an unfinished last message holds already.
        """
        call_format = self._format_for(use) if use.functions else None
        if call_format is None and self.tags is None:
            return None
        inside = self.tags is not None and opens_inside(self.tags, prompt_text, continued_text)
        return ReplySpec(self.tags, inside, shows_reasoning, call_format, use.names, use.parallel)

    def grammar(self, use: ToolUse, token_id: Callable[[str], int | None]) -> GrammarSpec | None:
        """The grammar of an answer that must be a tool call; None where it need not be one."""
        if not use.forced:
            return None
        form = _WRITTEN[self._format_for(use).name]
        marks = {mark: token_id(mark) for mark in (HERMES.opener, HERMES.closer, MISTRAL.opener)}
        written = f"{form.before_all}{form.before_call}{form.after_call}"
        special_ids = {mark: found for mark, found in marks.items() if found is not None and mark in written}
        return spec_for_tools(use.forced, replace(form, special_ids=special_ids), parallel=use.parallel)

    def thinking(
        self, prompt_text: str, *, continued_text: str, special_id: Callable[[str], int | None]
    ) -> Thinking | None:
        """What may come before an answer to this prompt that a grammar holds; None where it begins at once.

        `special_id` gives the id of a special token.
        """
        tags = self.tags
        if tags is None:
            return None
        is_open = opens_inside(tags, prompt_text, continued_text)
        if not is_open and (continued_text or prompt_text.rstrip().endswith(tags.closer)):
            return None
        return Thinking(tags.opener, tags.closer, special_id(tags.opener), special_id(tags.closer), is_open)

    def _format_for(self, use: ToolUse) -> CallFormat:
        """The model's format. One that is told to call a tool can be held to any format."""
        if self.call_format is None and not use.forced:
            raise InvalidRequest(
                "tools",
                "tools: how this model writes tool calls is not known from its chat template; start the router with "
                f"--tool-call-parser ({', '.join(FORMATS)}), or set tool_choice to 'required' or to a function",
            )
        return self.call_format or HERMES


_WRITTEN = {
    HERMES.name: ToolFormat(before_call="<tool_call>\n", after_call="\n</tool_call>", between_calls="\n"),
    LLAMA3.name: ToolFormat(arguments_key="parameters", between_calls="; "),
    MISTRAL.name: ToolFormat(before_all="[TOOL_CALLS] [", between_calls=", ", after_all="]"),
}
"""How each format is written where a grammar prescribes it."""
