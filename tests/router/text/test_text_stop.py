"""The stop matcher against its slow twin, which looks at the whole text after every character."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.text.stop import StopMatcher

TEXT = st.text(alphabet="ab<", max_size=24)
STOPS = st.lists(st.text(alphabet="ab<", min_size=1, max_size=4), max_size=4).map(tuple)


def slow_cut(text: str, stops: tuple[str, ...], first_armed_char: int = 0) -> tuple[str, str | None]:
    """(text shown, stop string): grow the text by one character until it ends with a stop string."""
    for end in range(first_armed_char + 1, len(text) + 1):
        matched = [stop for stop in stops if text[:end].endswith(stop)]
        if matched:
            longest = max(matched, key=len)
            return text[: end - len(longest)], longest
    return text, None


def chunks_of(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(TEXT, STOPS, st.lists(st.integers(0, 99), max_size=8))
def test_equals_the_slow_twin_in_any_chunking(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown, matched, taken = "", None, ""
    for chunk in chunks_of(text, cuts):
        step = matcher.push(chunk)
        shown, matched, taken = shown + step.text, step.matched, taken + chunk
        if matched is not None:
            break
        held = taken[len(shown) :]
        assert taken.startswith(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
    else:
        shown += matcher.flush()
    assert (shown, matched) == slow_cut(text, stops)


@given(TEXT, TEXT, STOPS)
def test_matches_completed_while_not_armed_are_ignored(early: str, late: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(early, armed=False).text
    step = matcher.push(late)
    shown += step.text if step.matched is not None else step.text + matcher.flush()
    assert (shown, step.matched) == slow_cut(early + late, stops, first_armed_char=len(early))


def test_nothing_of_a_stop_string_is_shown() -> None:
    matcher = StopMatcher(("</end>",))
    assert [matcher.push(piece).text for piece in ("one <", "/e", "n", "x </")] == ["one ", "", "", "</enx "]
    step = matcher.push("end> never")
    assert (step.text, step.matched) == ("", "</end>")
    with pytest.raises(ValueError, match="ended"):
        matcher.push("more")


def test_match_can_be_included() -> None:
    step = StopMatcher(("b",), include_match=True).push("abc")
    assert (step.text, step.matched) == ("ab", "b")


def test_match_at_the_first_character() -> None:
    assert StopMatcher(("R",)).push("R").text == ""


def test_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("",))
