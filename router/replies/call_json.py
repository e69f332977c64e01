"""JSON that a model writes, followed character by character: a nested value, and an object that may be a tool call.

Knows where a value ends and which top-level keys an object has, so that arguments can be passed on while they are
written. Inside arguments only brackets and strings are watched: a model may write what no JSON parser takes, and the
client is told exactly that text. Knows nothing of what stands around an object.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Container

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_BLANKS = " \t\r\n"


class NestedValue:
    """An object or array from its opening bracket on."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.done = False

    def push(self, text: str) -> int:
        """Take characters up to the closing bracket; returns how many were taken."""
        for position, char in enumerate(text):
            if self._in_string:
                self._take_in_string(char)
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.done = True
                    return position + 1
        return len(text)

    def _take_in_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


class _Place(enum.Enum):
    """What comes next in the object."""

    OPENING = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    STRING = enum.auto()
    NESTED = enum.auto()
    SCALAR = enum.auto()
    COMMA = enum.auto()
    DONE = enum.auto()
    BAD = enum.auto()


class CallObject:
    """`{"name": NAME, "arguments": {…}}`, its keys in any order and others beside them.

    `is_call` turns true once, when the name is one of `names` and the arguments have begun (or the object has ended
    without any); from then on `take_arguments` gives them as they come. `is_bad` says that it cannot be read on: it is
    no call, or one whose object is broken behind its arguments.
    """

    def __init__(self, names: Container[str]) -> None:
        self._names = names
        self._place = _Place.OPENING
        self._key = ""
        self._reads_key = True
        self._token = ""
        self._escaped = False
        self._nested: NestedValue | None = None
        self._arguments = ""
        self._arguments_are_open = False
        self._num_given = 0
        self.name = ""

    @property
    def is_bad(self) -> bool:
        return self._place is _Place.BAD

    @property
    def is_done(self) -> bool:
        return self._place is _Place.DONE

    @property
    def is_call(self) -> bool:
        return bool(self.name) and (self._arguments_are_open or self.is_done)

    def take_arguments(self) -> str:
        """The arguments' text that has not been taken yet. Call it only once `is_call` is true."""
        if self.is_done and not self._arguments:
            self._arguments = "{}"
        text = self._arguments[self._num_given :]
        self._num_given = len(self._arguments)
        return text

    def push(self, text: str) -> int:
        """Take characters up to the object's end, or to the one that makes it no call; returns how many."""
        position = 0
        while position < len(text) and not self.is_done:
            if self._nested is not None:
                position += self._take_nested(self._nested, text[position:])
                continue
            num_taken = self._take(text[position])
            if self.is_bad:
                break
            position += num_taken
        return position

    def _take(self, char: str) -> int:
        """One character outside nested values; 0 when it has only ended what came before it."""
        match self._place:
            case _Place.STRING:
                self._take_in_string(char)
            case _Place.SCALAR:
                if char in ",}" or char in _BLANKS:
                    self._end_value(self._token)
                    return 0
                self._token += char
            case _ if char in _BLANKS:
                pass
            case _Place.OPENING:
                self._place = _Place.KEY if char == "{" else _Place.BAD
            case _Place.KEY:
                self._begin_key(char)
            case _Place.COLON:
                self._place = _Place.VALUE if char == ":" else _Place.BAD
            case _Place.VALUE:
                self._begin_value(char)
            case _Place.COMMA:
                self._place = {",": _Place.KEY, "}": self._closed}.get(char, _Place.BAD)
        return 1

    @property
    def _closed(self) -> _Place:
        return _Place.DONE if self.name else _Place.BAD

    def _begin_key(self, char: str) -> None:
        self._reads_key, self._token = True, char
        self._place = {'"': _Place.STRING, "}": self._closed}.get(char, _Place.BAD)

    def _begin_value(self, char: str) -> None:
        self._reads_key = False
        if char == '"':
            self._place, self._token = _Place.STRING, char
        elif char == "{" or (char == "[" and self._key not in ARGUMENT_KEYS):
            if self._key == "name" or (self._key in ARGUMENT_KEYS and self._arguments):
                self._place = _Place.BAD
                return
            self._place, self._nested = _Place.NESTED, NestedValue()
            self._nested.push(char)
            if self._key in ARGUMENT_KEYS:
                self._arguments, self._arguments_are_open = char, True
        elif char in "[]}:,":
            self._place = _Place.BAD
        else:
            self._place, self._token = _Place.SCALAR, char

    def _take_in_string(self, char: str) -> None:
        self._token += char
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            if self._reads_key:
                self._end_key()
            else:
                self._end_value(self._token)

    def _end_key(self) -> None:
        key = _decode(self._token)
        self._key = key if isinstance(key, str) else ""
        self._place = _Place.COLON if isinstance(key, str) else _Place.BAD

    def _take_nested(self, nested: NestedValue, text: str) -> int:
        num_taken = nested.push(text)
        if self._key in ARGUMENT_KEYS:
            self._arguments += text[:num_taken]
        if nested.done:
            self._nested, self._place = None, _Place.COMMA
        return num_taken

    def _end_value(self, token: str) -> None:
        """A string or scalar is complete."""
        value = _decode(token)
        self._place = _Place.COMMA
        if value is _UNREADABLE:
            self._place = _Place.BAD
        elif self._key == "name":
            if isinstance(value, str) and value in self._names and not self.name:
                self.name = value
            else:
                self._place = _Place.BAD
        elif self._key in ARGUMENT_KEYS:
            # Some models write the arguments as a string of JSON, and null or "" for none.
            text = value.strip() if isinstance(value, str) else ""
            if self._arguments or not (value is None or text == "" or isinstance(_decode(text), dict)):
                self._place = _Place.BAD
            self._arguments = text


_UNREADABLE = object()


def _decode(text: str) -> object:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return _UNREADABLE
