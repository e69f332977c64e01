"""JSON read in pieces: the same values, and the same complaints at the same places, as from `json.loads`."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.openai.json_pieces import loads_in_pieces

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


def test_others_run_while_a_long_prompt_is_read() -> None:
    """Between two looks at the clock of another thread passes a small part of what all of the reading takes."""
    data = json.dumps({"prompt": list(range(1000, 601_000))}).encode()
    gaps, done = [0.0], threading.Event()

    def watch() -> None:
        last = time.perf_counter()
        while not done.is_set():
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        begin = time.perf_counter()
        assert len(loads_in_pieces(data, refuse)["prompt"]) == 600_000
        whole_s = time.perf_counter() - begin
    finally:
        done.set()
        watcher.join()
    assert max(gaps) < whole_s / 2
