"""The supervisor over tiny real children: start failures, restarts, drains, and deaths of its own."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.stack.supervisor import Backoff

FAKE_STACK = str(Path(__file__).with_name("fake_stack.py"))
WAIT_S = 20

needs_pidfd = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="watches pids as Linux can")


class Stack:
    """A running fake stack: its lines, and the children that were seen to start, by name, the newest pid last."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.pids: dict[str, list[int]] = {}

    def read_until(self, pattern: str) -> str:
        """Read on to the first line that matches; fails when the output ends before it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._note(line.rstrip())
            if re.search(pattern, line):
                return line.rstrip()
        raise AssertionError(f"no line matched {pattern!r} in {self.lines}")

    def finish(self) -> int:
        """Read to the end; returns the exit status."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._note(line.rstrip())
        return self.process.wait(WAIT_S)

    def _note(self, line: str) -> None:
        self.lines.append(line)
        if up := re.search(r"\| (\w+) up (\d+)$", line):
            self.pids.setdefault(up[1], []).append(int(up[2]))


@contextmanager
def stack(*words: str) -> Iterator[Stack]:
    process = subprocess.Popen(
        [sys.executable, FAKE_STACK, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    watchdog = threading.Timer(WAIT_S, process.kill)
    watchdog.start()
    try:
        yield Stack(process)
    finally:
        watchdog.cancel()
        process.kill()
        process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


def wait_gone(descriptors: list[int]) -> None:
    """Wait until each process behind a pidfd has ended."""
    for descriptor in descriptors:
        readable, _, _ = select.select([descriptor], [], [], WAIT_S)
        os.close(descriptor)
        assert readable, "a child outlived its supervisor"


def test_a_child_that_fails_at_the_start_stops_the_stack_with_its_cause_as_the_last_line() -> None:
    with stack("router:serve", "worker:fail") as running:
        assert running.finish() == 1
    assert running.lines[-1] == "octavo: worker: the cupboard is bare"


def test_a_check_that_fails_ends_the_stack_before_a_child_has_begun() -> None:
    with stack("router:serve", "worker:deaf", "--unsound") as running:
        assert running.finish() == 1
    assert running.lines == ["octavo: the floor is rotten"]


def test_a_child_killed_at_the_start_is_named_with_its_signal() -> None:
    with stack("router:serve", "scheduler:dies") as running:
        assert running.finish() == 1
    assert running.lines[-1].startswith("octavo: scheduler was killed by SIGKILL")


def test_a_child_that_dies_later_is_started_again() -> None:
    with stack("router:serve", "worker:serve") as running:
        running.read_until("READY")
        (first,) = running.pids["worker"]
        os.kill(first, signal.SIGKILL)
        running.read_until(r"worker was killed by SIGKILL.*started again")
        running.read_until(r"worker up")
        second = running.pids["worker"][-1]
        assert second != first
        os.kill(second, signal.SIGTERM)  # it ends without an error, and is needed all the same
        running.read_until(r"worker up")
        running.process.send_signal(signal.SIGTERM)
        assert running.finish() == 0


def test_the_first_signal_drains_the_children_in_their_order() -> None:
    with stack("router:serve", "scheduler:serve", "worker:serve") as running:
        running.read_until("READY")
        running.process.send_signal(signal.SIGINT)
        assert running.finish() == 0
    drained = [line.split("| ")[1] for line in running.lines if line.endswith("drained")]
    assert drained == ["router drained", "scheduler drained", "worker drained"]


def test_a_signal_before_the_stack_is_ready_drains_too() -> None:
    with stack("router:serve", "worker:deaf", "--never-ready", "--timeout", "0.1") as running:
        running.read_until("worker up")
        running.process.send_signal(signal.SIGINT)
        assert running.finish() == 0
    assert any("worker did not end within" in line for line in running.lines)


@needs_pidfd
def test_a_second_signal_stops_at_once_and_takes_the_children_along() -> None:
    with stack("router:deaf", "worker:serve") as running:
        running.read_until("READY")
        held = [os.pidfd_open(pid) for pids in running.pids.values() for pid in pids]
        running.process.send_signal(signal.SIGINT)
        running.read_until("draining")
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(WAIT_S) == 128 + signal.SIGINT
        wait_gone(held)


@needs_pidfd
def test_killing_the_supervisor_kills_the_children() -> None:
    with stack("router:serve", "worker:deaf") as running:
        running.read_until("READY")
        held = [os.pidfd_open(pid) for pids in running.pids.values() for pid in pids]
        assert len(held) == 2
        running.process.kill()
        wait_gone(held)


def test_lines_carry_the_name_of_their_child() -> None:
    with stack("router:serve") as running:
        assert running.read_until("up").startswith("router     | router up ")


@pytest.mark.parametrize(("restarts", "wait_s"), [(0, 0.2), (1, 0.4), (3, 1.6), (20, 30.0), (5000, 30.0)])
def test_restarts_wait_longer_each_time_up_to_a_limit(restarts: int, wait_s: float) -> None:
    assert Backoff().wait_s(restarts) == pytest.approx(wait_s)
