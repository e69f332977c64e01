"""Starts the other ranks of a replica on this machine, as child processes that end with this one.

Knows commands and processes; must not know what ranks do.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from octavo.options import secret_environment, to_arguments
from octavo.process import Lifeline, StartError
from worker_svc.config import WorkerConfig
from worker_svc.parallel.place import RankPlace

_LOG = logging.getLogger(__name__)

_END_S = 5.0
# What every rank would say alike is said once.
_QUIETER = {"info": "warning"}


class LocalRanks:
    """The child processes of ranks 1 and on. They have this process's output, and are gone when it is."""

    def __init__(self, config: WorkerConfig, place: RankPlace) -> None:
        """Starts them. `place` is rank 0's."""
        own = replace(config, log_level=_QUIETER.get(config.log_level, config.log_level))
        command = (sys.executable, "-m", "octavo", "worker", *to_arguments(own))
        self._lifeline = Lifeline()
        self._processes = {
            rank: self._start(command, replace(place, rank=rank, local_rank=rank), secret_environment(config))
            for rank in range(1, place.num_ranks)
        }
        _LOG.debug("ranks started: pids %s", ", ".join(str(child.pid) for child in self._processes.values()))

    def check(self) -> None:
        """Raises StartError when one has ended, which none does by itself."""
        for rank, child in self._processes.items():
            if child.poll() is not None:
                raise StartError(f"rank {rank} (pid {child.pid}) {self.ending(rank)} before it arrived")

    def ending(self, rank: int) -> str:
        """How a rank that is gone has ended, as the end of a sentence."""
        child = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_END_S)
        if child.returncode is None:
            return "has closed its connection"
        if child.returncode < 0:
            name = signal.Signals(-child.returncode).name
            return f"was killed by {name}" + (", perhaps for want of memory" if name == "SIGKILL" else "")
        return f"has ended with exit status {child.returncode}"

    def end(self) -> None:
        """Waits a little for those that were told to end, and kills the rest."""
        for child in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_END_S)
        self.kill()
        self._lifeline.close()

    def kill(self) -> None:
        """Ends all that are left at once."""
        for child in self._processes.values():
            child.kill()
            child.wait()

    def _start(self, command: Sequence[str], place: RankPlace, secrets: dict[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **secrets, **self._lifeline.environment, **place.environment},
            pass_fds=self._lifeline.descriptors,
        )
