"""Times calls on an NVIDIA GPU without what launching them costs. Knows torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def graph_time_ms(calls: Sequence[Callable[[], object]]) -> float:
    """Milliseconds of one of the calls, which run in turn inside a CUDA graph; the median of five replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    repeats = max(1, 20 // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    times: list[float] = []
    for _ in range(6):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / (repeats * len(calls)))
    return sorted(times[1:])[2]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
