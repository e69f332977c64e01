"""Starts `octavo serve` from the environment of this interpreter, asks one question over gRPC, stops it, checks both.

What CI runs against the built wheel, outside the source tree.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

START_LIMIT_S = 180
STOP_LIMIT_S = 30


def free_port() -> int:
    """A TCP port that is free on loopback now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    octavo = Path(sys.executable).parent / "octavo"
    grpc_port, http_port = free_port(), free_port()
    command = [str(octavo), "serve", "--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    stack = subprocess.Popen(command)
    try:
        from octavo import Client

        with Client(f"127.0.0.1:{grpc_port}") as client:
            client.wait_until_ready(timeout=START_LIMIT_S)
            answer = client.chat([{"role": "user", "content": "Name a colour."}], max_tokens=16, temperature=0)
        print(f"the wheel answers: {answer.text!r}")
        assert answer.text.strip(), "an empty answer"
    finally:
        stack.send_signal(signal.SIGINT)
        code = stack.wait(STOP_LIMIT_S)
    print(f"octavo serve exited with {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
