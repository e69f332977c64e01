"""A tiny child for the supervisor's tests: `fake_child.py NAME MODE`.

It says when it is up and when it drained, and ends as MODE asks: `serve` on SIGTERM, `deaf` not even then,
`fail` at once with a cause, `dies` at once by SIGKILL.
"""

from __future__ import annotations

import os
import signal
import sys

from octavo.process import await_gate, die_with_parent


def main() -> None:
    name, mode = sys.argv[1:3]
    die_with_parent()
    await_gate()
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: end(name))
    if mode == "fail":
        print("octavo worker: the cupboard is bare", file=sys.stderr, flush=True)
        raise SystemExit(3)
    if mode == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    print(f"{name} up {os.getpid()}", flush=True)
    while True:
        signal.pause()


def end(name: str) -> None:
    print(f"{name} drained", flush=True)
    os._exit(0)


main()
