"""JSON read in pieces: the same values, and the same complaints at the same places, as from `json.loads`."""

from __future__ import annotations

import json
import sys
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.openai.json_pieces import MOST_CHARS, loads_in_pieces

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
MANY_NUMBERS = st.builds(
    lambda unit, count: unit * count,
    st.lists(st.integers(-5, 10**6) | st.sampled_from([0.5, 1e30]), min_size=1, max_size=3),
    st.integers(100, 6000),
)
VALUES = st.recursive(
    SCALARS | MANY_NUMBERS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def outcome(loads: Any, data: bytes) -> object:
    """The value, or what was said of it."""
    try:
        return loads(data, parse_constant=refuse)
    except ValueError as error:
        return type(error), str(error)


def in_one_go(data: bytes, parse_constant: Any) -> Any:
    return json.loads(data, parse_constant=parse_constant)


@settings(max_examples=100, deadline=None)
@given(value=VALUES, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_a_text_reads_the_same(value: object, indent: int | None, ascii_only: bool) -> None:
    data = json.dumps(value, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    assert outcome(loads_in_pieces, data) == outcome(in_one_go, data)


@settings(max_examples=300, deadline=None)
@given(
    numbers=MANY_NUMBERS,
    place=st.floats(0, 1),
    patch=st.sampled_from(
        [
            ",",
            ",,",
            "]",
            "[",
            "{",
            "}",
            '"',
            " ",
            "\n1",
            "x",
            "01",
            "1.",
            "1e",
            "-",
            "NaN",
            "Infinity",
            ",]",
            "null",
            "",
        ]
    ),
    num_cut=st.integers(0, 3),
)
def test_a_broken_text_is_broken_the_same(numbers: list[float], place: float, patch: str, num_cut: int) -> None:
    text = json.dumps({"prompt": numbers, "n": 1})
    at = int(place * len(text))
    data = f"{text[:at]}{patch}{text[at + num_cut :]}".encode()
    assert outcome(loads_in_pieces, data) == outcome(in_one_go, data)


@pytest.mark.parametrize(
    "text",
    [
        "[" + "1," * 300 + "]",
        "[" + " " * 300 + ",1]",
        "[" + " " * 300 + "]",
        "[" + "1," * 8192 + "]",
        "[" + "1," * 8192 + " 2",
        "[" + "1" * 20_000 + ",2]",
        "[" + "1, " * 9000 + '"x", 3]',
        "\ufeff[1]",
    ],
)
def test_edges_of_pieces(text: str) -> None:
    data = text.encode()
    assert outcome(loads_in_pieces, data) == outcome(in_one_go, data)


def read_in_one_go(data: bytes) -> list[int]:
    """Characters of each text that the fast reader took, which holds the interpreter meanwhile.

    All else is Python's own code, which gives way every few milliseconds whatever there is to do.
    """
    lengths: list[int] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is json.JSONDecoder.raw_decode.__code__:
            reader, text = frame.f_locals["self"], frame.f_locals["s"]
            if type(reader) is json.JSONDecoder:
                lengths.append(len(text))

    sys.setprofile(note)
    try:
        loads_in_pieces(data, refuse)
    finally:
        sys.setprofile(None)
    return lengths


def test_others_run_while_a_long_prompt_is_read() -> None:
    """No piece is long, and few numbers are left to the slow reader."""
    data = json.dumps({"prompt": list(range(1000, 101_000)), "n": 1}).encode()
    lengths = read_in_one_go(data)
    assert max(lengths) <= MOST_CHARS + len("[]")
    assert sum(lengths) > 0.99 * len(data)
