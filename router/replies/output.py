"""An answer's text, as it comes, into reasoning, content and tool calls: one follower for each choice.

`ReplySpec` says what to look for; it is made with the prompt and is the same for every choice. Where it looks for
nothing, there is none, and text is content. Knows no tokens and no protocol.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.replies.formats import CallFormat
from router.replies.reasoning import ReasoningSplitter, ReasoningTags
from router.replies.tool_calls import ToolCallParser
from router.replies.types import ReplyPiece


@dataclass(frozen=True)
class ReplySpec:
    """What one request's answers may hold beside content."""

    tags: ReasoningTags | None = None
    begins_inside: bool = False
    """The prompt has opened the thinking."""
    shows_reasoning: bool = True
    """False drops the thinking: the client does not want it."""
    call_format: CallFormat | None = None
    tool_names: frozenset[str] = frozenset()
    parallel_calls: bool = True
    """False ends the answer with its first call."""

    @property
    def marks(self) -> tuple[str, ...]:
        """What must be seen in the text even where it is a special token."""
        tags = (self.tags.opener, self.tags.closer) if self.tags else ()
        calls = (self.call_format.opener, self.call_format.closer) if self.call_format else ()
        names = ("[ARGS]", "[CALL_ID]") if self.call_format and self.call_format.takes_names else ()
        return tuple(filter(None, (*tags, *calls, *names)))


class Reply:
    """Follows one choice."""

    def __init__(self, spec: ReplySpec) -> None:
        self._spec = spec
        self._splitter = None if spec.tags is None else ReasoningSplitter(spec.tags, inside=spec.begins_inside)
        self._calls = None if spec.call_format is None else self._call_parser(spec.call_format)

    def push(self, text: str) -> ReplyPiece:
        """What this text makes certain."""
        reasoning, content = self._splitter.push(text) if self._splitter else ("", text)
        piece = self._calls.push(content) if self._calls else ReplyPiece(content)
        return piece._replace(reasoning=reasoning if self._spec.shows_reasoning else "")

    def finish(self) -> ReplyPiece:
        """No more text: whatever is still held."""
        reasoning, content = self._splitter.finish() if self._splitter else ("", "")
        if self._calls is None:
            piece = ReplyPiece(content)
        else:
            last, rest = self._calls.push(content), self._calls.finish()
            piece = ReplyPiece(last.content + rest.content, "", last.tool_calls + rest.tool_calls)
        return piece._replace(reasoning=reasoning if self._spec.shows_reasoning else "")

    @property
    def has_calls(self) -> bool:
        """Whether a tool is called."""
        return self._calls is not None and self._calls.num_begun > 0

    @property
    def is_over(self) -> bool:
        """Whether nothing that may still come is wanted: the one call is complete."""
        return self._calls is not None and self._calls.is_over

    def _call_parser(self, form: CallFormat) -> ToolCallParser:
        return ToolCallParser(form, self._spec.tool_names, single=not self._spec.parallel_calls)
