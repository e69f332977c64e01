"""The CPU seconds of a start are told by process, for those that the measurement started and no others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.comparison.starts import cpu_of_descendants


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_below_this_one_are_told_by_their_command() -> None:
    program = "print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        found = dict(cpu_of_descendants(os.getpid()))
        assert dict(cpu_of_descendants(child.pid)).keys() == {"worker"}
        child.communicate("\n")
    assert found.keys() == {"worker"}
    assert 0 <= found["worker"] < 60
    assert not dict(cpu_of_descendants(os.getpid()))
