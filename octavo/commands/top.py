"""`octavo top`: a running scheduler live in the terminal: queues, KV tiers, throughput, and why steps were no bigger.

`frame` makes a screen from two snapshots of the load; the rest asks for them and writes with plain ANSI sequences.
"""

from __future__ import annotations

import argparse
import os
import select
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TextIO

import grpc

from octavo.commands.control import add_address, connect, explain_failure
from octavo.commands.ctl import state_of
from octavo.commands.tables import columns, counted
from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.option_parsing import number
from octavo.options import Limits
from octavo.process import StartError

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_TIMEOUT_S = 5.0
_MOST_TENANTS = 5


def top(words: Sequence[str]) -> int:
    """Shows the load until q or Ctrl-C. Raises StartError when no scheduler answers at first."""
    description = "Watch a running scheduler in the terminal; q ends it."
    parser = argparse.ArgumentParser(prog="octavo top", description=description, allow_abbrev=False)
    add_address(parser)
    parser.add_argument(
        "--interval",
        type=number(float, Limits(0.05, 3600)),
        default=1.0,
        metavar="SECONDS",
        help="Between two looks (default: 1).",
    )
    parser.add_argument("--once", action="store_true", help="Print one screen, of one interval, and end.")
    namespace = parser.parse_args(words)
    address = namespace.scheduler_address
    channel, stub = connect(namespace)

    def ask() -> pb.GetStatisticsResponse:
        try:
            load: pb.GetStatisticsResponse = stub.GetStatistics(pb.GetStatisticsRequest(), timeout=_TIMEOUT_S)
            return load
        except grpc.RpcError as error:
            raise explain_failure(address, error) from None

    try:
        first = ask()
        if namespace.once or not sys.stdout.isatty():
            time.sleep(namespace.interval)
            width = shutil.get_terminal_size((120, 24)).columns
            print("\n".join(frame(first, ask(), address, width)))
        else:
            _watch(first, ask, address, namespace.interval)
    finally:
        channel.close()
    return 0


def _watch(
    first: pb.GetStatisticsResponse, ask: Callable[[], pb.GetStatisticsResponse], address: str, interval_s: float
) -> None:
    """Redraws after each interval; a scheduler that goes away is waited for."""
    before = first
    with _screen(sys.stdout) as was_quit_pressed:
        while not was_quit_pressed(interval_s):
            size = shutil.get_terminal_size()
            try:
                now = ask()
                lines, before = frame(before, now, address, size.columns), now
            except StartError as error:
                lines = [str(error)]
            _draw(sys.stdout, cut(lines, size.lines - 1), size.columns)


@contextmanager
def _screen(stream: TextIO) -> Iterator[Callable[[float], bool]]:
    """The terminal's other screen; yields what waits for so long and says whether q was pressed."""
    restore = None
    if sys.stdin.isatty() and os.name == "posix":
        import termios
        import tty

        descriptor = sys.stdin.fileno()
        settings = termios.tcgetattr(descriptor)
        tty.setcbreak(descriptor)
        restore = partial(termios.tcsetattr, descriptor, termios.TCSADRAIN, settings)

    def was_quit_pressed(wait_s: float) -> bool:
        if restore is None:
            time.sleep(wait_s)
            return False
        return bool(select.select([sys.stdin], [], [], wait_s)[0]) and sys.stdin.read(1) in ("q", "Q", "")

    stream.write(_ENTER)
    stream.flush()
    try:
        yield was_quit_pressed
    finally:
        stream.write(_LEAVE)
        stream.flush()
        if restore is not None:
            restore()


def _draw(stream: TextIO, lines: Sequence[str], width: int) -> None:
    stream.write(_HOME + "".join(f"{line[:width]}{_CLEAR_LINE}\r\n" for line in lines) + _CLEAR_BELOW)
    stream.flush()


# What a screen shows ---------------------------------------------------------------------------------------------


def frame(before: pb.GetStatisticsResponse, now: pb.GetStatisticsResponse, address: str, width: int) -> list[str]:
    """The lines of a screen: levels of `now`, and rates between the two."""
    seconds = max(1e-9, (now.now_ns - before.now_ns) / 1e9)
    earlier = {replica.name: replica for replica in before.replicas}
    changes = [_Change(earlier.get(replica.name), replica, seconds) for replica in now.replicas]
    lines = [*_head(now, changes, address, width), "", *_queues(before, now, width)]
    lines += _tenants(now)
    lines += ["", *_limits(changes, width)]
    lines += ["", *_replicas(changes, width)]
    return lines


def cut(lines: Sequence[str], height: int) -> Sequence[str]:
    """As many lines as a terminal of that height shows; the last one says how many more there are."""
    if len(lines) <= height:
        return lines
    num_shown = max(0, height - 1)
    return [*lines[:num_shown], f"... {len(lines) - num_shown} more lines; see `octavo ctl replicas`"][:height]


class _Change:
    """A replica, and what it did since the earlier look; one that attached since then did everything since then."""

    def __init__(self, before: pb.Replica | None, now: pb.Replica, seconds: float) -> None:
        is_same = before is not None and before.num_steps <= now.num_steps
        self.before = before if before is not None and is_same else pb.Replica()
        self.now = now
        self.seconds = seconds

    def rate(self, name: str) -> float:
        """A counter's growth a second."""
        growth: int = getattr(self.now, name) - getattr(self.before, name)
        return growth / self.seconds

    def growth(self, name: str) -> Counter[str]:
        """The growth of a map of counters."""
        return grown(getattr(self.before, name), getattr(self.now, name))


def grown(before: Mapping[str, int], now: Mapping[str, int]) -> Counter[str]:
    """By how much each counter grew; what did not is left out."""
    return Counter({name: count - before.get(name, 0) for name, count in now.items() if count > before.get(name, 0)})


def _head(now: pb.GetStatisticsResponse, changes: Sequence[_Change], address: str, width: int) -> list[str]:
    output = sum(change.rate("num_sampled_tokens") for change in changes)
    computed = sum(change.rate("num_computed_tokens") for change in changes)
    preempted = sum(change.rate("num_preemptions") for change in changes)
    starting = f", {len(now.starting)} starting" if now.starting else ""
    replicas, routers = counted(len(now.replicas), "replica"), counted(now.num_routers, "router")
    parts = [f"octavo scheduler {address}: {replicas}{starting}, {routers}", f"output {output:.0f} tok/s"]
    return flow([*parts, f"computed {computed:.0f} tok/s", f"preempted {preempted:.1f}/s"], "   ", width)


def flow(parts: Sequence[str], between: str, width: int) -> list[str]:
    """The parts one after another on lines of at most `width`, where a part fits one; later lines are indented."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(between) + len(part) <= width:
            lines[-1] += between + part
        else:
            lines.append(f"  {part}")
    return lines


def _queues(before: pb.GetStatisticsResponse, now: pb.GetStatisticsResponse, width: int) -> list[str]:
    earlier = {queue.model: queue.num_waiting for queue in before.queues}
    lines = []
    for queue in now.queues:
        change = queue.num_waiting - earlier.get(queue.model, 0)
        pace = (
            f", one starts every {queue.start_interval_ns / 1e9:.3g} s" if queue.HasField("start_interval_ns") else ""
        )
        lines.append(f"queue {queue.model}: {queue.num_waiting} waiting ({change:+d}){pace}")
    refused = ", ".join(f"{count} {reason}" for reason, count in sorted(now.num_refused.items())) or "none"
    totals = [f"waiting tokens {now.num_waiting_tokens}", f"following another's prompt {now.num_following}"]
    totals += [f"refused {refused}", f"past their deadline {now.num_expired}"]
    return lines + flow(totals, "   ", width)


def _tenants(now: pb.GetStatisticsResponse) -> list[str]:
    """Only where there is more than one."""
    if len(now.tenants) < 2:
        return []
    busiest = sorted(now.tenants, key=lambda tenant: (-tenant.num_waiting, -tenant.num_served_tokens, tenant.tenant))
    shown = [
        f"{tenant.tenant or '(none)'} {tenant.num_waiting} waiting, {tenant.num_served_tokens} tokens served"
        for tenant in busiest[:_MOST_TENANTS]
    ]
    rest = f"; {len(busiest) - _MOST_TENANTS} more" if len(busiest) > _MOST_TENANTS else ""
    return [f"tenants: {'; '.join(shown)}{rest}"]


def _replicas(changes: Sequence[_Change], width: int) -> list[str]:
    if not changes:
        return ["no replica is attached"]
    bar_width = 20 if width >= 130 else 12
    head = (
        "replica",
        "state",
        "running",
        "KV  # held = cached",
        "preempt",
        "host",
        "out tok/s",
        "tok/s",
        "step",
        "cached",
    )
    rows = [head, *(_replica(change, bar_width) for change in changes)]
    whole = columns(rows)
    if max(map(len, whole)) <= width:
        return whole
    # Each replica on two lines, rather than half of it nowhere.
    return [*columns([row[:5] for row in rows]), "", *columns([row[:1] + row[5:] for row in rows])]


def _replica(change: _Change, bar_width: int) -> tuple[str, ...]:
    now = change.now
    steps = change.rate("num_steps")
    cached, computed = change.rate("num_cached_tokens"), change.rate("num_computed_tokens")
    return (
        now.name,
        state_of(now) + (" keeps room" if now.has_kept_room else ""),
        f"{now.num_running}/{now.num_slots}" + (f" ({now.num_prefilling} prefill)" if now.num_prefilling else ""),
        bar(now.num_used_blocks, now.num_cached_blocks, now.num_blocks, bar_width),
        str(now.num_preemptions),
        bar(0, now.num_cached_host_blocks, now.num_host_blocks, bar_width // 2) if now.num_host_blocks else "-",
        f"{change.rate('num_sampled_tokens'):.0f}",
        f"{computed:.0f}",
        f"{1e3 / steps:.1f} ms" if steps > 0 else "-",
        f"{cached / (cached + computed):.0%}" if cached + computed > 0 else "-",
    )


def bar(num_held: int, num_cached: int, num_all: int, width: int) -> str:
    """`[####==....] 60%`: blocks held by sequences, idle ones that are findable, and the rest; the share of both."""
    if num_all == 0:
        return "-"
    held = round(width * num_held / num_all)
    cached = min(width - held, round(width * num_cached / num_all))
    share = (num_held + num_cached) / num_all
    return f"[{'#' * held}{'=' * cached}{'.' * (width - held - cached)}] {share:.0%}"


def _limits(changes: Sequence[_Change], width: int) -> list[str]:
    """Why steps were no bigger, since the earlier look and since the start."""
    recent: Counter[str] = Counter()
    always: Counter[str] = Counter()
    for change in changes:
        recent += change.growth("num_steps_by_limit")
        always.update(change.now.num_steps_by_limit)
    lines = []
    for when, counts in (("steps no bigger because of   now:", recent), (f"{'':26} always:", always)):
        first, *others = _shares(counts)
        lines += flow([f"{when} {first}", *others], ", ", width)
    return lines


def _shares(counts: Counter[str]) -> list[str]:
    total = counts.total()
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [f"{name} {count / total:.0%}" for name, count in ordered] or ["no step was made"]
