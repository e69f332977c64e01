"""Finds tool calls in an answer's text while it comes, and lets everything else through as content.

What may become a call is held back only until it is one or is not: once a known function's name and the beginning of
its arguments are there, the arguments are passed on as they come. Text that only looks like a call stays text, to the
character. Blanks between text and calls belong to neither.
"""

from __future__ import annotations

import enum
import re
import secrets
from collections.abc import Callable, Container

from router.replies.call_json import CallObject, NestedValue
from router.replies.formats import CallFormat
from router.replies.types import ReplyPiece, ToolCallDelta

_NAME_MARKS = re.compile(r"\[(?:CALL_ID|ARGS)\]")
_MAX_NAME_CHARS = 256


class _State(enum.Enum):
    START = enum.auto()  # nothing but blanks so far
    TEXT = enum.auto()
    OPENED = enum.auto()  # behind an opener or a separator: what comes?
    NAME = enum.auto()  # a bare name, up to its arguments
    CALL = enum.auto()  # inside an object, or inside the arguments behind a bare name
    BEHIND = enum.auto()  # behind a call: its closer, a separator, or text


class ToolCallParser:
    """Follows one choice. `names` are the functions that may be called; with `single`, nothing counts after a call."""

    def __init__(self, form: CallFormat, names: Container[str], *, single: bool = False) -> None:
        self._form = form
        self._names = names
        self._single = single
        self._state = _State.START if form.begins_bare else _State.TEXT
        self._buffer = ""
        self._raw = ""  # what has been taken since the opener, for as long as it may turn out to be text
        self._in_list = False
        self._object: CallObject | None = None
        self._value: NestedValue | None = None
        self._is_told = False  # the call under way has been announced
        self._follows_call = False  # no text since the last call
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self.num_begun = 0
        self.num_complete = 0

    def push(self, text: str) -> ReplyPiece:
        """What this text makes certain."""
        self._buffer += text
        while self._buffer and not self.is_over and _STEPS[self._state](self):
            pass
        return self._take()

    @property
    def is_over(self) -> bool:
        """Whether the one call that was wanted is complete."""
        return self._single and self.num_complete > 0

    def finish(self) -> ReplyPiece:
        """No more text: what is still held is text, unless a call has begun with it."""
        if not self._is_told and not self.is_over:
            rest = self._raw + self._buffer
            is_closer = self._state is _State.BEHIND and self._form.closer.startswith(rest.strip())
            is_nothing = rest.strip() in ("", self._form.separator) or is_closer
            if not (self.num_begun and is_nothing):
                self._content.append(rest)
        self._raw = self._buffer = ""
        return self._take()

    def _take(self) -> ReplyPiece:
        piece = ReplyPiece("".join(self._content), "", tuple(self._calls))
        self._content, self._calls = [], []
        return piece

    # Each step looks at the buffer in one state, and says whether there may be more to do with what is left of it.

    def _at_start(self) -> bool:
        stripped = self._buffer.lstrip()
        if stripped.startswith("{"):
            self._raw = self._buffer[: len(self._buffer) - len(stripped)]
            self._buffer = stripped
            self._state = _State.OPENED
        elif stripped:
            self._state = _State.TEXT
        return bool(stripped)

    def _in_text(self) -> bool:
        opener = self._form.opener
        if self._follows_call:
            self._buffer = self._buffer.lstrip()
            self._follows_call = not self._buffer
        at = self._buffer.find(opener)
        if at >= 0:
            shown, end = self._buffer[:at].rstrip(), at + len(opener)
            self._content.append(shown)
            self._raw, self._buffer = self._buffer[len(shown) : end], self._buffer[end:]
            self._state, self._in_list = _State.OPENED, False
            return True
        num_held = partial_suffix(self._buffer, opener)
        shown = self._buffer[: len(self._buffer) - num_held].rstrip()
        self._content.append(shown)
        self._buffer = self._buffer[len(shown) :]
        return False

    def _is_opened(self) -> bool:
        stripped = self._drop_blanks()
        if not stripped:
            return False
        if stripped[0] == "{":
            self._object, self._state = CallObject(self._names), _State.CALL
        elif stripped[0] == "[" and self._form.takes_list and not self._in_list:
            self._in_list = True
            self._shift(1)
        elif self._form.takes_names and not self._in_list:
            self._state = _State.NAME
        else:
            self._give_up()
        return True

    def _in_name(self) -> bool:
        brace = self._buffer.find("{")
        name = _NAME_MARKS.split(self._buffer if brace < 0 else self._buffer[:brace])[0].strip()
        if brace < 0:
            if len(self._buffer) <= _MAX_NAME_CHARS:
                return False
            self._give_up()
        elif name not in self._names:
            self._give_up()
        else:
            self._buffer, self._raw = self._buffer[brace:], ""
            self._object, self._value = None, NestedValue()
            self._begin(name, "")
            self._state = _State.CALL
        return True

    def _in_call(self) -> bool:
        if self._object is None:
            return self._in_arguments()
        found = self._object
        self._shift(found.push(self._buffer))
        if found.is_bad and not found.is_call:
            self._give_up()
            return True
        if found.is_call:
            arguments = found.take_arguments()
            if not self._is_told:
                self._begin(found.name, arguments)
            elif arguments:
                self._calls.append(ToolCallDelta(self.num_begun - 1, arguments=arguments))
        if found.is_done or found.is_bad:
            self._end()
            return True
        return False

    def _in_arguments(self) -> bool:
        value = self._value
        assert value is not None
        num_taken = value.push(self._buffer)
        self._calls.append(ToolCallDelta(self.num_begun - 1, arguments=self._buffer[:num_taken]))
        self._buffer = self._buffer[num_taken:]
        if value.done:
            self._end()
        return value.done

    def _behind_call(self) -> bool:
        form, stripped = self._form, self._buffer.lstrip()
        if not stripped:
            return False
        separator = "," if self._in_list else form.separator
        if self._in_list and stripped[0] == "]":
            self._buffer, self._in_list = stripped[1:], False
        elif separator and stripped.startswith(separator):
            self._raw, self._buffer = separator, stripped[len(separator) :]
            self._state = _State.OPENED
        elif form.separator and stripped[0] == "{":
            self._raw, self._buffer, self._state = "", stripped, _State.OPENED
        elif form.closer and stripped.startswith(form.closer):
            self._buffer, self._state = stripped[len(form.closer) :], _State.TEXT
        elif form.closer and form.closer.startswith(stripped):
            return False
        else:
            self._state = _State.TEXT
        return True

    # Moves.

    def _drop_blanks(self) -> str:
        stripped = self._buffer.lstrip()
        self._shift(len(self._buffer) - len(stripped))
        return stripped

    def _shift(self, num_chars: int) -> None:
        """Take characters that are text again if this is no call."""
        if not self._is_told:
            self._raw += self._buffer[:num_chars]
        self._buffer = self._buffer[num_chars:]

    def _begin(self, name: str, arguments: str) -> None:
        call_id = secrets.token_hex(5)[:9] if self._form.short_ids else f"call_{secrets.token_hex(12)}"
        self._calls.append(ToolCallDelta(self.num_begun, call_id, name, arguments))
        self.num_begun += 1
        self._is_told, self._raw = True, ""

    def _end(self) -> None:
        self.num_complete += 1
        self._state, self._raw = _State.BEHIND, ""
        self._is_told, self._follows_call = False, True

    def _give_up(self) -> None:
        """It is no call: its opening is text, and what follows is looked at afresh."""
        at = self._raw.find(self._form.opener)
        num_shown = len(self._raw) if at < 0 else at + len(self._form.opener)
        self._content.append(self._raw[:num_shown])
        self._buffer, self._raw = self._raw[num_shown:] + self._buffer, ""
        self._state, self._in_list = _State.TEXT, False


_STEPS: dict[_State, Callable[[ToolCallParser], bool]] = {
    _State.START: ToolCallParser._at_start,
    _State.TEXT: ToolCallParser._in_text,
    _State.OPENED: ToolCallParser._is_opened,
    _State.NAME: ToolCallParser._in_name,
    _State.CALL: ToolCallParser._in_call,
    _State.BEHIND: ToolCallParser._behind_call,
}


def partial_suffix(text: str, mark: str) -> int:
    """Length of the longest proper prefix of `mark` that `text` ends with."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
