"""A supervisor over fake children, as a process of its own: `fake_stack.py NAME:MODE ... [--timeout SECONDS]`.

It is ready once every child named on the command line has said that it is up, and then prints `READY`;
with --never-ready it goes on waiting, and with --unsound the check fails.
"""

from __future__ import annotations

import asyncio
import io
import logging
import sys
from pathlib import Path

from octavo.process import StartError
from octavo.stack.console import Console
from octavo.stack.supervisor import Backoff, ChildSpec, Stages, Supervisor

CHILD = str(Path(__file__).with_name("fake_child.py"))


class Watcher(io.StringIO):
    """Passes lines on to standard output and counts the children that are up."""

    def __init__(self, expected: int) -> None:
        super().__init__()
        self.missing = expected
        self.all_up = asyncio.Event()

    def write(self, text: str) -> int:
        sys.stdout.write(text)
        self.missing -= text.count(" up ")
        if self.missing <= 0:
            self.all_up.set()
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()


async def main() -> int:
    timeout_s = float(sys.argv[sys.argv.index("--timeout") + 1]) if "--timeout" in sys.argv else 20.0
    names = [word.split(":") for word in sys.argv[1:] if ":" in word]
    specs = [ChildSpec(name, (sys.executable, CHILD, name, mode)) for name, mode in names]
    watcher = Watcher(len(specs) + ("--never-ready" in sys.argv))

    async def wait_ready() -> None:
        await watcher.all_up.wait()

    async def announce() -> None:
        print("READY", flush=True)

    def check() -> None:
        if "--unsound" in sys.argv:
            raise StartError("the floor is rotten")

    supervisor = Supervisor(
        specs,
        Stages(check, wait_ready, announce),
        Console(watcher),
        drain_timeout_s=timeout_s,
        backoff=Backoff(first_s=0.0, longest_s=0.0),
    )
    return await supervisor.run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        sys.exit(asyncio.run(main()))
    except StartError as error:
        sys.exit(f"octavo: {error}")
