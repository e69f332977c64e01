"""What counting costs a router for each streamed token: `python -m benchmarks.bench_metrics`.

Prints nanoseconds of CPU for one delta of one sequence (its look at the clock included), for the beginning and end of a
sequence together, and for a scrape.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from router.metrics import RouterMetrics
from router.streams.types import ReceiptParts

_REPEATS = 5


def cpu_ns(work: Callable[[], None], count: int) -> float:
    """The least CPU time of `count` runs, by the run."""
    best = float("inf")
    for _ in range(_REPEATS):
        begun = time.process_time_ns()
        for _ in range(count):
            work()
        best = min(best, (time.process_time_ns() - begun) / count)
    return best


def main() -> None:
    metrics = RouterMetrics()
    meter = metrics.sequence("model", "", metrics.clock())
    receipt = ReceiptParts(first_queue_s=0.1)

    def one_sequence() -> None:
        metrics.begin("model", "", 100, 1)
        each = metrics.sequence("model", "", metrics.clock())
        each.tokens(1)
        each.complete("stop", receipt)

    def scrape() -> None:
        metrics.set.render()

    print(f"one delta        {cpu_ns(lambda: meter.tokens(1), 200_000):10.0f} ns")
    print(f"one sequence     {cpu_ns(one_sequence, 20_000):10.0f} ns")
    print(f"one scrape       {cpu_ns(scrape, 50):10.0f} ns")


if __name__ == "__main__":
    main()
