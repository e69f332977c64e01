"""JSON in pieces, for a thread beside the event loop: the interpreter is never held for long.

`json.loads` reads a text in one go, and nothing else runs meanwhile: 200 ms for a prompt of 1.7 million token ids. Here
Python's own slow reader, which gives way every few milliseconds, goes through the text, and the fast one reads the
numbers of long lists, a piece at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from json.decoder import JSONArray  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any

MOST_CHARS = 16384
"""Longest piece that is read in one go."""

_NUMBERS = re.compile(rf"[-+.0-9eE, \t\n\r]{{256,{MOST_CHARS}}}")
_BLANKS = re.compile(r"[ \t\n\r]*")

Scan = Callable[[str, int], tuple[Any, int]]


def loads_in_pieces(data: bytes, parse_constant: Callable[[str], Any]) -> Any:
    """What `json.loads` gives. Raises what it raises; RecursionError for less nesting, some 300 levels."""
    text = data.decode(json.detect_encoding(data), "surrogatepass")
    return _Decoder(parse_constant=parse_constant).decode(text)


class _Decoder(json.JSONDecoder):
    def __init__(self, *, parse_constant: Callable[[str], Any]) -> None:
        super().__init__(parse_constant=parse_constant)
        self.parse_array = _read_array
        self.scan_once = py_make_scanner(self)


def _read_array(text_and_start: tuple[str, int], scan_once: Scan) -> tuple[list[Any], int]:
    """A list from behind its bracket on, and where it ends."""
    text, at = text_and_start
    values: list[Any] = []
    while (run := _NUMBERS.match(text, at)) is not None and (cut := text.rfind(",", at, run.end())) > 0:
        try:
            piece = json.loads(f"[{text[at:cut]}]")
        except ValueError:
            break  # read one by one, it says what is wrong and where
        if not piece:
            break  # a comma before the first value
        values += piece
        at = cut + 1
    if not values:
        whole: tuple[list[Any], int] = JSONArray((text, at), scan_once)
        return whole
    blanks = _BLANKS.match(text, at)
    at = at if blanks is None else blanks.end()
    if text[at : at + 1] == "]":
        raise json.JSONDecodeError("Expecting value", text, at)
    rest, end = JSONArray((text, at), scan_once)
    return values + rest, end
