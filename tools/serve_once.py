"""Starts `octavo serve` from the environment of this interpreter, asks one question over gRPC, stops it, checks both.

What CI runs against the built wheel, outside the source tree.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from octavo.client import Client, OctavoError
from octavo.ports import free_ports

START_LIMIT_S = 180
STOP_LIMIT_S = 30


def wait_until_ready(client: Client, stack: subprocess.Popen[bytes]) -> None:
    """Asks until a model can produce a token. Raises RuntimeError when the stack ends or takes too long."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        if (status := stack.poll()) is not None:
            raise RuntimeError(f"octavo serve ended with {status}")
        try:
            if any(model.ready for model in client.models(timeout_s=5)):
                return
        except OctavoError:
            pass  # nobody listens yet
        time.sleep(0.2)
    raise RuntimeError(f"not ready within {START_LIMIT_S} s")


def main() -> int:
    octavo = Path(sys.executable).parent / "octavo"
    grpc_port, http_port = free_ports(2)
    command = [str(octavo), "serve", "--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    stack = subprocess.Popen(command)
    try:
        with Client(f"127.0.0.1:{grpc_port}") as client:
            wait_until_ready(client, stack)
            answer = client.chat([{"role": "user", "content": "Name a colour."}], max_tokens=16, temperature=0)
        print(f"the wheel answers: {answer.text!r}")
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/web/chat.js") as page:
            assert page.read(), "the chat page is not in the wheel"
        assert answer.text.strip(), "an empty answer"
    finally:
        stack.send_signal(signal.SIGINT)
        code = stack.wait(STOP_LIMIT_S)
    print(f"octavo serve exited with {code}")
    return code


if __name__ == "__main__":
    sys.exit(main())
