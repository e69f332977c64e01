"""Which control strings of a rendered prompt the chat template wrote, and which came in with the request.

A template joins its own text with the client's, and may trim, split or re-encode the latter on the way, so where a
control string comes from cannot be read off the result. We find out by rendering again in disguise: in everything the
client sent, each punctuation character of control strings (such as `<`, `|`, `>`) is exchanged for a private-use twin
that occurs nowhere in request or template. The twin is one character, so the disguised text lines up with the plain
one character by character, and a control string in it was written by the template: one that the client wrote, or that
came about across a border, shows a twin. Twins are chosen after the request is seen: nobody can send them.

A template may look into the content (`'</think>' in content`), and then the disguise would show. Where the two texts do
not line up, strings that the template itself compares with stay readable, and a mark before each control string among
them says that the client wrote it. That text, marks and twins removed, is then the prompt.
Knows strings and trees of them; nothing of tokens or roles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_PRIVATE_USE = range(0xE000, 0xF900)
_PRIVATE_CHARS = re.compile(f"[{chr(_PRIVATE_USE.start)}-{chr(_PRIVATE_USE.stop - 1)}]")
_WORD_CHARS = re.compile(r"[\w\s.$/-]")


def strings_of(value: object) -> Iterator[str]:
    """Every string of a tree of mappings and lists, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from strings_of(key)
            yield from strings_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from strings_of(item)


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same tree with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {map_strings(key, change): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change) for item in value]
    return value


class ControlStrings:
    """The control strings of one model, and what its template compares text with. Shared by all requests."""

    def __init__(self, controls: frozenset[str], template_constants: frozenset[str]) -> None:
        """`template_constants`: string constants in the template's expressions."""
        self.pattern = _any_of(controls)
        self.marks = "".join(sorted({char for control in controls for char in control if not _WORD_CHARS.match(char)}))
        """The punctuation of control strings: characters that no ordinary word, key or role holds."""
        wordlike = {control for control in controls if not set(control) & set(self.marks)}
        self.suspects = re.compile("|".join(filter(None, (_class_of(self.marks), _alternatives(wordlike)))) or "(?!)")
        readable = {
            text
            for text in template_constants
            if len(text) > 1 and self.suspects.search(text) and not _overlaps(text, controls)
        }
        anything = _alternatives(readable | controls) or "(?!)"
        self.readable = frozenset(readable)
        """What the template may look for, and no piece of a control string: kept where the texts do not line up."""
        self.readable_or_suspect = re.compile(f"{anything}|{self.suspects.pattern}")


class Disguise:
    """The twins of one request."""

    def __init__(self, controls: ControlStrings, strings: list[str], template_source: str) -> None:
        """`strings`: all that the client sent (see `strings_of`)."""
        self._controls = controls
        self.needed = any(controls.suspects.search(text) for text in strings)
        """Whether anything the client sent could be part of a control string."""
        used = {char for text in (*strings, template_source) for char in _PRIVATE_CHARS.findall(text)}
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        self.tag = next(free)
        """A character that occurs nowhere else: marks the end of a message to be continued."""
        self._mark = next(free)
        starts = {c for text in strings for found in controls.suspects.findall(text) for c in found[:1]}
        self._twins = {char: next(free) for char in sorted(starts)}
        self._originals = {ord(twin): char for char, twin in self._twins.items()}

    def full(self, text: str) -> str:
        """Disguise whatever could be part of a control string. Keeps the length."""
        return self._controls.suspects.sub(self._twin_of, text)

    def readable(self, text: str) -> str:
        """The same, but for strings that the template may look for; control strings among those get a mark before."""

        def change(match: re.Match[str]) -> str:
            if match.group() not in self._controls.readable:
                return self.full(match.group())
            return self._controls.pattern.sub(lambda control: self._mark + control.group(), match.group())

        return self._controls.readable_or_suspect.sub(change, text)

    def lines_up(self, disguised: str, plain: str) -> bool:
        """Whether a fully disguised rendering is the plain one, character by character."""
        return len(disguised) == len(plain) and disguised.translate(self._originals) == plain

    def spans(self, disguised: str) -> list[tuple[int, int]]:
        """(start, end) of the control strings the template wrote, in a text that lines up with the plain one."""
        return [match.span() for match in self._controls.pattern.finditer(disguised)]

    def undo(self, rendered: str) -> tuple[str, list[tuple[int, int]]]:
        """(text, spans of the control strings the template wrote) of a readable rendering."""
        for char in (self._mark, *self._twins.values()):
            # A template that writes JSON in ASCII has escaped them.
            rendered = re.sub(f"\\\\u{ord(char):04x}", char, rendered, flags=re.IGNORECASE)
        pieces: list[str] = []
        spans: list[tuple[int, int]] = []
        position = num_chars = 0
        for match in self._controls.pattern.finditer(rendered):
            before = rendered[position : match.start()].replace(self._mark, "")
            num_chars += len(before)
            if not rendered.startswith(self._mark, max(0, match.start() - 1), match.start()):
                spans.append((num_chars, num_chars + len(match.group())))
            pieces += (before, match.group())
            num_chars += len(match.group())
            position = match.end()
        pieces.append(rendered[position:].replace(self._mark, ""))
        return "".join(pieces).translate(self._originals), spans

    def _twin_of(self, match: re.Match[str]) -> str:
        found = match.group()
        return self._twins[found[0]] + found[1:]


def _alternatives(strings: set[str] | frozenset[str]) -> str:
    """A pattern for any of the strings, the longest first, as the tokenizer matches its own."""
    return "|".join(re.escape(text) for text in sorted(strings, key=lambda text: (-len(text), text)))


def _overlaps(text: str, controls: frozenset[str]) -> bool:
    """Whether `text` holds a part of a control string that neighbouring text could complete."""
    for control in controls:
        if text in control and text != control:
            return True
        for length in range(1, min(len(text), len(control))):
            if text.endswith(control[:length]) or text.startswith(control[-length:]):
                return True
    return False


def _any_of(strings: frozenset[str]) -> re.Pattern[str]:
    return re.compile(_alternatives(strings) or "(?!)")


def _class_of(chars: str) -> str:
    return f"[{re.escape(chars)}]" if chars else ""
