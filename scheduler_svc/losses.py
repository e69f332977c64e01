"""Which losses of replicas were no crashes: their processes came back, so nobody who ran there is to blame.

A worker that lost its connection attaches again with the number of its process. What the scheduler then still knows of
who was in flight is taken off the crash_group_sizes that routers bring. Knows streams and numbers; must not know the
core. What is forgotten, by a bound or a restart, and a process that is not back yet, count as a crash: then a request
that lost two replicas while alone there fails, which is the lesser evil.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

_MAX_STREAMS = 10_000


class Losses:
    """What streams lost, the latest of them."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, list[tuple[int, int]]] = OrderedDict()  # stream -> (process, rows in flight)
        self._excused: OrderedDict[int, list[int]] = OrderedDict()  # stream -> rows in flight

    def note_lost(self, process: int, in_flight: Iterable[tuple[int, int]]) -> None:
        """A process was lost, with these (stream key, rows in flight); 0 is no process."""
        for stream_key, num_rows in in_flight if process else ():
            self._open.setdefault(stream_key, []).append((process, num_rows))
            _bound(self._open)

    def note_attached(self, process: int) -> None:
        """A process attached: what it was suspected of is excused."""
        for stream_key, lost in tuple(self._open.items()) if process else ():
            excused = [num_rows for suspect, num_rows in lost if suspect == process]
            if not excused:
                continue
            self._excused.setdefault(stream_key, []).extend(excused)
            _bound(self._excused)
            self._open[stream_key] = [each for each in lost if each[0] != process]
            if not self._open[stream_key]:
                del self._open[stream_key]

    def crashes(self, stream_key: int, crash_group_sizes: Sequence[int]) -> tuple[int, ...]:
        """Those of a stream's losses that are not excused, in their order."""
        excused, crashes = list(self._excused.get(stream_key, ())), []
        for num_rows in crash_group_sizes:
            if num_rows in excused:
                excused.remove(num_rows)
            else:
                crashes.append(num_rows)
        return tuple(crashes)


def _bound(streams: OrderedDict[int, list[int]] | OrderedDict[int, list[tuple[int, int]]]) -> None:
    while len(streams) > _MAX_STREAMS:
        streams.popitem(last=False)
