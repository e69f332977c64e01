"""The flight recorder's ring: whole segments, each with the state that it begins with."""

from __future__ import annotations

from itertools import count

from scheduler_svc.ring import Ring
from scheduler_svc.state import CoreState


def test_a_state_that_takes_too_much_is_tried_ever_more_seldom() -> None:
    sizes = [10_000] * 100 + [10] * 100
    tried: list[int] = []

    def capture() -> CoreState:
        tried.append(number)
        return CoreState(num_bytes=sizes[number])

    ring = Ring(1000, capture)
    for number in range(200):
        ring.append(b"x" * 250, number)
    assert [index for index in tried if index < 100] == [0, 2, 5, 10, 19, 36, 69]
    assert [index for index in tried if index >= 100][1:] == list(range(135, 200))
    assert ring.oldest.state is not None
    assert ring.oldest.defect == ""


def test_the_oldest_segments_go_first_and_memory_is_bounded() -> None:
    ring = Ring(10_000, lambda: CoreState(num_bytes=1_000))
    for number in count():
        ring.append(b"%04d" % number * 10, number)
        kept = [int(record[:4]) for record in ring]
        assert kept == list(range(ring.oldest.first, number + 1))
        assert ring.num_noted == number + 1
        assert len(kept) * 100 <= 10_000
        assert ring.oldest.decisions == max(0, ring.oldest.first - 1)
        if ring.oldest.first > 200:
            break
    assert len(kept) >= 40


def test_a_ring_that_forgets_begins_with_the_state_of_that_moment() -> None:
    ring = Ring(10_000, lambda: CoreState(num_bytes=7))
    for number in range(5):
        ring.append(b"x", number)
    ring.forget(4)
    assert (list(ring), ring.num_noted) == ([], 5)
    ring.append(b"y", 5)
    assert (list(ring), ring.oldest.first, ring.oldest.decisions) == ([b"y"], 5, 4)
