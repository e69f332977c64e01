"""A meter of a card that is not there: it runs the work, and says what it was told."""

from __future__ import annotations

from collections.abc import Callable

from worker_svc.device.memory import CardMemory


class FakeMeter:
    """`peak` for the largest step, `kept` for each call of `kept_bytes` in turn."""

    def __init__(self, card: CardMemory, peak: int = 0, kept: tuple[int, ...] = ()) -> None:
        self.card, self.peak, self.kept = card, peak, list(kept)
        self.num_works = 0

    def read(self) -> CardMemory:
        return self.card

    def peak_bytes(self, work: Callable[[], None]) -> int:
        work()
        self.num_works += 1
        return self.peak

    def kept_bytes(self, work: Callable[[], object]) -> int:
        work()
        self.num_works += 1
        return self.kept.pop(0)
