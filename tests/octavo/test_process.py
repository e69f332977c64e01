"""Signals, the lifeline, phases, ports and log lines."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from octavo.logs import is_log_line, setup_logging
from octavo.phases import Phase, Phases
from octavo.ports import free_port, port_in_use, port_owner
from octavo.process import Lifeline, Shutdown, StartGate

WAIT_S = 20


def test_the_first_signal_drains_and_the_second_is_handed_on() -> None:
    second: list[int] = []
    shutdown = Shutdown(at_second=second.append)
    try:
        assert not shutdown.draining
        assert not shutdown.wait(timeout_s=0)
        signal.raise_signal(signal.SIGINT)
        assert shutdown.draining
        assert shutdown.wait(timeout_s=0)
        assert second == []
        signal.raise_signal(signal.SIGTERM)
        assert second == [signal.SIGTERM]
    finally:
        shutdown.close()


def test_close_gives_the_signals_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    Shutdown().close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_waiting_thread_is_released() -> None:
    shutdown = Shutdown()
    try:
        thread = threading.Thread(target=shutdown.wait)
        thread.start()
        shutdown.request()
        shutdown.request()
        thread.join(WAIT_S)
        assert not thread.is_alive()
    finally:
        shutdown.close()


@pytest.mark.parametrize("ask", [lambda _: signal.raise_signal(signal.SIGTERM), Shutdown.request])
def test_a_waiting_coroutine_is_released(ask: Callable[[Shutdown], None]) -> None:
    async def wait(shutdown: Shutdown) -> None:
        waiting = asyncio.create_task(shutdown.wait_async())
        asyncio.get_running_loop().call_soon(ask, shutdown)
        await asyncio.wait_for(waiting, WAIT_S)
        await asyncio.wait_for(shutdown.wait_async(), WAIT_S)  # asked already: returns at once

    shutdown = Shutdown()
    try:
        asyncio.run(wait(shutdown))
    finally:
        shutdown.close()


def run_child(program: str, line: Lifeline) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **line.environment},
        pass_fds=line.descriptors,
        stdout=subprocess.PIPE,
    )


def test_a_child_dies_when_the_lifeline_closes() -> None:
    # The first line is written once the child holds on to the lifeline; then it waits for ever.
    program = (
        "import signal; from octavo.process import die_with_parent; "
        "die_with_parent(); print('held', flush=True); signal.pause()"
    )
    line = Lifeline()
    child = run_child(program, line)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"held\n"
        line.close()
        assert child.wait(WAIT_S) in (128 + signal.SIGKILL, -signal.SIGKILL)
    finally:
        child.kill()
        child.stdout.close()


def test_children_wait_at_the_gate_until_it_opens_and_never_after() -> None:
    program = "from octavo.process import await_gate; print('here', flush=True); await_gate(); print('through')"
    gate = StartGate()

    def start_child() -> subprocess.Popen[bytes]:
        environment = {**os.environ, **gate.environment}
        command = [sys.executable, "-c", program]
        return subprocess.Popen(command, env=environment, pass_fds=gate.descriptors, stdout=subprocess.PIPE)

    first = start_child()
    assert first.stdout is not None
    try:
        assert first.stdout.readline() == b"here\n"
        assert select.select([first.stdout], [], [], 0.0)[0] == []
        gate.open()
        assert first.stdout.readline() == b"through\n"
        assert start_child().communicate(timeout=WAIT_S)[0] == b"here\nthrough\n"
        gate.close()
    finally:
        first.kill()
        first.communicate()


def test_a_second_signal_ends_a_process_that_does_not_listen() -> None:
    program = (
        "import signal; from octavo.process import Shutdown; shutdown = Shutdown(); "
        "print('up', flush=True); shutdown.wait(); print('draining', flush=True)\nwhile True: pass"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert child.stdout is not None
    try:
        for word, signum in ((b"up\n", signal.SIGINT), (b"draining\n", signal.SIGINT)):
            assert child.stdout.readline() == word
            child.send_signal(signum)
        assert child.wait(WAIT_S) == 128 + signal.SIGINT
    finally:
        child.kill()
        child.stdout.close()


def test_without_a_supervisor_there_is_no_lifeline() -> None:
    program = "from octavo.process import die_with_parent; import threading; die_with_parent(); " + (
        "assert threading.active_count() == 1"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=WAIT_S)


class Ticks:
    """A clock that moves a second each time it is read."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


def test_phases_are_timed_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    reports: list[Phase] = []
    phases = Phases(reports.append, clock=Ticks())
    with phases.phase("import"):
        pass
    with phases.phase("weights", total=2) as advance:
        advance(1)
        advance(2)
    assert [str(phase) for phase in phases.snapshot()] == ["import 1.00 s", "weights 2/2 3.00 s"]
    assert [(phase.name, phase.done, phase.ended) for phase in reports] == [
        ("import", None, False),
        ("import", None, True),
        ("weights", 0, False),
        ("weights", 1, False),
        ("weights", 2, False),
        ("weights", 2, True),
    ]
    assert caplog.messages == ["start: import 1.00 s", "start: weights 2/2 3.00 s"]


def test_a_phase_that_fails_stays_the_last_and_unended(caplog: pytest.LogCaptureFixture) -> None:
    phases = Phases(clock=Ticks())
    with pytest.raises(RuntimeError), phases.phase("KV"):
        raise RuntimeError("no room")
    assert [(phase.name, phase.ended) for phase in phases.snapshot()] == [("KV", False)]
    assert caplog.messages == ["start: KV failed after 1.00 s"]


def test_a_port_in_use_is_known_with_its_owner() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert port_in_use("127.0.0.1", port)
        if sys.platform == "linux":
            owner = port_owner(port)
            assert owner is not None
            assert owner.endswith(f"(pid {os.getpid()})")
    assert not port_in_use("127.0.0.1", port)
    assert not port_in_use("127.0.0.1", 0)
    assert not port_in_use("127.0.0.1", free_port())


def test_an_address_of_another_machine_is_an_error_not_a_port_in_use() -> None:
    with pytest.raises(OSError, match="assign"):
        port_in_use("192.0.2.1", 8000)


def test_log_lines_carry_process_and_level_and_are_told_apart(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    own = logging.getLogger("octavo")
    try:
        setup_logging("worker", "info")
        logging.getLogger("octavo.test").info("hello\nthere")
        logging.getLogger("octavo.test").debug("unseen")
        logging.getLogger("somebody.else").info("unseen")
        first, second = capfd.readouterr().err.splitlines()
    finally:
        root.handlers[:] = before
        root.setLevel(level)
        own.setLevel(logging.NOTSET)
    assert is_log_line(first)
    assert first.endswith("worker     INFO    hello")
    assert second == "    there"
    assert not is_log_line("Traceback (most recent call last):")


def test_closing_a_lifeline_frees_its_descriptors() -> None:
    line = Lifeline()
    (read_end,) = line.descriptors
    line.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read_end)
