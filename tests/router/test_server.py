"""The router as a process: light imports, drains on the first signal, ends on the second, says why it cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from octavo.ports import free_port
from tests.fakes.router_stack import MODEL, in_loop, model_info
from tests.fakes.scheduler import Attempt, FakeScheduler, speak

PROGRAM = """
import sys
from octavo.logs import setup_logging
from router.config import RouterConfig
from router.server import main
setup_logging("router")
model, name, http, scheduler = sys.argv[1:]
status = main(RouterConfig(model=model, served_model_name=name, http_port=int(http), grpc_port=0,
                           scheduler_address=scheduler))
heavy = {"torch", "transformers", "scheduler_svc", "worker_svc", "kernels"} & sys.modules.keys()
assert not heavy, heavy
sys.exit(status)
"""


class Process:
    def __init__(self, process: asyncio.subprocess.Process, scheduler: FakeScheduler, port: int) -> None:
        self.process, self.scheduler = process, scheduler
        self.url = f"http://127.0.0.1:{port}"

    async def until_logged(self, text: str) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            if text in line.decode():
                return
        raise AssertionError(f"the process ended without saying {text!r}")


@contextlib.asynccontextmanager
async def process(model_dir: Path) -> AsyncIterator[Process]:
    scheduler = FakeScheduler(model_info(model_dir), speak([]))
    scheduler_port, http_port = await scheduler.start(), free_port()
    words = [str(model_dir), MODEL, str(http_port), f"127.0.0.1:{scheduler_port}"]
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *words, stderr=asyncio.subprocess.PIPE
    )
    try:
        yield Process(started, scheduler, http_port)
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()
        await scheduler.stop()


@in_loop
async def test_f46_a_signal_drains_and_the_process_ends_well(model_dir: Path) -> None:
    async with process(model_dir) as made, httpx2.AsyncClient(base_url=made.url) as http:
        go_on = asyncio.Event()

        async def patient(attempt: Attempt) -> None:
            await go_on.wait()
            await speak([2 + ord("o"), 2 + ord("k")])(attempt)

        made.scheduler.behave = patient
        await made.until_logged("ready: tiny")
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
        await made.scheduler.until(lambda: len(made.scheduler.requests) == 1)
        made.process.send_signal(signal.SIGTERM)
        await made.until_logged("draining 1 requests")
        assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        go_on.set()
        assert (await asked).json()["choices"][0]["text"] == "ok"
        assert await made.process.wait() == 0


@in_loop
async def test_f46_an_idle_router_does_not_linger_over_open_connections(model_dir: Path) -> None:
    async with process(model_dir) as made, httpx2.AsyncClient(base_url=made.url) as http:
        await made.until_logged("ready: tiny")
        assert (await http.get("/health")).status_code == 200  # the connection stays open
        made.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(made.process.wait(), 2.0) == 0


@in_loop
async def test_f46_a_second_signal_ends_it_now(model_dir: Path) -> None:
    async with process(model_dir) as made, httpx2.AsyncClient(base_url=made.url) as http:

        async def never(attempt: Attempt) -> None:
            await asyncio.get_running_loop().create_future()

        made.scheduler.behave = never
        await made.until_logged("ready: tiny")
        asked = asyncio.create_task(http.post("/v1/completions", json={"prompt": "a"}))
        await made.scheduler.until(lambda: len(made.scheduler.requests) == 1)
        made.process.send_signal(signal.SIGINT)
        await made.until_logged("draining 1 requests")
        made.process.send_signal(signal.SIGINT)
        assert await made.process.wait() == 128 + signal.SIGINT
        with pytest.raises(httpx2.HTTPError):
            await asked


def test_importing_the_router_is_light() -> None:
    code = (
        "import sys, router, router.config, router.server\n"
        "bad = {'torch', 'numpy', 'transformers', 'kernels', 'worker_svc', 'scheduler_svc'} & sys.modules.keys()\n"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_tokenizer_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys\nfrom router.config import RouterConfig\nfrom router.server import main\n"
        "from octavo.process import StartError\n"
        "for model in sys.argv[1:]:\n"
        "    try:\n        main(RouterConfig(model=model, http_port=0, grpc_port=0))\n"
        "    except StartError as error:\n        print(error)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    assert "tokenizer.json is missing" in shown.stdout
