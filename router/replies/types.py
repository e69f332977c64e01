"""What the text of a chat's answer falls into, as frozen pieces: reasoning, content and tool calls.

Knows no model's way of writing them and no protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one tool call. `call_id` and `name` come whole with the first delta of a call and are empty after it."""

    index: int
    """Which of the choice's calls, from 0."""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    """JSON text to append, as the model wrote it."""


class ReplyPiece(NamedTuple):
    """What some text adds to an answer. Pieces joined do not depend on how the text was cut."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


NOTHING = ReplyPiece()
