"""Splits the thinking of a model that thinks before it answers from the answer.

Knows the tags around it. Whether a text begins inside them is read off the prompt: many templates open the tag
themselves. Blanks at the borders belong to neither side.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from router.replies.tool_calls import partial_suffix


@dataclass(frozen=True)
class ReasoningTags:
    """What stands around the thinking."""

    opener: str
    closer: str
    begins_open: bool = False
    """The model thinks from its first token on, whether or not it or its template writes the opener."""


THINK = ReasoningTags("<think>", "</think>")
REASONING_TAGS: Mapping[str, ReasoningTags] = {
    "qwen3": THINK,
    "deepseek_r1": ReasoningTags("<think>", "</think>", begins_open=True),
    "mistral": ReasoningTags("[THINK]", "[/THINK]"),
}
"""As --reasoning-parser spells them."""
REASONING_PARSERS = ("auto", "none", *REASONING_TAGS)


def detect_tags(template_source: str) -> ReasoningTags | None:
    """The tags that a chat template knows of, None where it knows none."""
    for tags in (THINK, REASONING_TAGS["mistral"]):
        if tags.closer in template_source:
            return tags
    return None


def opens_inside(tags: ReasoningTags, prompt_text: str, continued_text: str = "") -> bool:
    """Whether what follows this prompt is thinking already. `continued_text`: the last message, where it goes on."""
    stripped = prompt_text.rstrip()
    if stripped.endswith(tags.opener) or continued_text.rfind(tags.opener) > continued_text.rfind(tags.closer):
        return True
    return tags.begins_open and not continued_text and not stripped.endswith(tags.closer)


class _Side(enum.Enum):
    START = enum.auto()
    INSIDE = enum.auto()
    CLOSED = enum.auto()  # behind the closer: blanks are dropped until content comes
    CONTENT = enum.auto()


class ReasoningSplitter:
    """Follows one choice."""

    def __init__(self, tags: ReasoningTags, *, inside: bool) -> None:
        self._tags = tags
        self._side = _Side.INSIDE if inside else _Side.START
        self._buffer = ""
        self._has_reasoning = False

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, content) that this text makes certain."""
        self._buffer += text
        reasoning, content = "", ""
        if self._side is _Side.START:
            self._look_for_opener()
        if self._side is _Side.INSIDE:
            reasoning = self._think()
        if self._side is _Side.CLOSED:
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._side = _Side.CONTENT
        if self._side is _Side.CONTENT:
            content, self._buffer = self._buffer, ""
        return reasoning, content

    def finish(self) -> tuple[str, str]:
        """No more text."""
        rest, self._buffer = self._buffer, ""
        if self._side is _Side.INSIDE:
            return rest.rstrip(), ""
        return "", rest if self._side is _Side.START else ""

    def _look_for_opener(self) -> None:
        stripped = self._buffer.lstrip()
        if stripped.startswith(self._tags.opener):
            self._buffer = stripped[len(self._tags.opener) :]
            self._side = _Side.INSIDE
        elif not self._tags.opener.startswith(stripped):
            self._side = _Side.CONTENT

    def _think(self) -> str:
        if not self._has_reasoning:
            self._buffer = self._buffer.lstrip()
            # A model may write the opener that its template has written too.
            if self._tags.opener.startswith(self._buffer):
                self._buffer = "" if self._buffer == self._tags.opener else self._buffer
                return ""
            self._buffer = self._buffer.removeprefix(self._tags.opener).lstrip()
        at = self._buffer.find(self._tags.closer)
        if at >= 0:
            reasoning = self._buffer[:at].rstrip()
            self._buffer = self._buffer[at + len(self._tags.closer) :]
            self._side = _Side.CLOSED
        else:
            num_held = partial_suffix(self._buffer, self._tags.closer)
            reasoning = self._buffer[: len(self._buffer) - num_held].rstrip()
            self._buffer = self._buffer[len(reasoning) :]
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        return reasoning
