"""compose.yaml for real: images without torch where none belongs, two routers, one killed, metrics scraped.

tools/prepare_compose.sh makes engine, base image and wheels ready first; it keeps what there is.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from octavo.client import Client
from octavo.sources.default_model import fetch_default_model

ROOT = Path(__file__).parents[2]
START_S = 300
PROMPT = "The capital of France is"


class Containers:
    """One project of docker-compose."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._name = f"octavo-test-{uuid.uuid4().hex[:8]}"
        self._environment = environment

    def compose(self, *arguments: str) -> str:
        """Run docker-compose; its standard output."""
        command = ["docker-compose", "--project-name", self._name, *arguments]
        done = subprocess.run(command, cwd=ROOT, env=self._environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"
        return done.stdout

    def ids(self, service: str) -> list[str]:
        """The running containers of a service."""
        found = self.compose("ps", "--quiet", service).split()
        return [container for container in found if inspect(container)["State"]["Running"]]

    def wait_healthy(self, service: str, count: int) -> list[str]:
        """Wait until `count` containers of the service are healthy; they are returned."""
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            healthy = [one for one in self.ids(service) if inspect(one)["State"]["Health"]["Status"] == "healthy"]
            if len(healthy) == count:
                return healthy
            time.sleep(1)
        pytest.fail(f"{service} is not healthy after {START_S} s:\n{self.compose('logs', '--tail=40')}")


def inspect(container: str) -> dict[str, Any]:
    """What the engine knows of a container."""
    done = subprocess.run(["docker", "inspect", container], capture_output=True, text=True, check=True)
    (found,) = json.loads(done.stdout)
    return dict(found)


def published(container: str, port: int) -> str:
    """host:port under which a container's port is reached from this machine."""
    (binding,) = inspect(container)["NetworkSettings"]["Ports"][f"{port}/tcp"]
    return f"{binding['HostIp']}:{binding['HostPort']}"


def get(address: str, path: str) -> tuple[int, str]:
    """GET; the status and the body."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def run_in(container: str, *command: str) -> subprocess.CompletedProcess[str]:
    """A command inside a container."""
    return subprocess.run(["docker", "exec", container, *command], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def prepared() -> dict[str, str]:
    """The environment that the images are built in."""
    done = subprocess.run(["tools/prepare_compose.sh"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"tools/prepare_compose.sh: {done.stderr[-2000:]}"
    return dict(os.environ, **dict(line.split("=", 1) for line in done.stdout.splitlines()))


@pytest.fixture(scope="module")
def containers(prepared: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Containers]:
    """A stack with two routers on the default model, mounted read-only."""
    models = tmp_path_factory.mktemp("models")
    models.chmod(0o755)
    target = models / "model.gguf"
    target.write_bytes(fetch_default_model().read_bytes())
    target.chmod(0o644)
    running = Containers({**prepared, "OCTAVO_MODEL": "/models/model.gguf", "OCTAVO_MODELS_DIR": str(models)})
    try:
        running.compose("build")
        running.compose("up", "--detach", "--scale", "router=2")
        yield running
    finally:
        running.compose("down", "--volumes", "--timeout", "20")


def test_two_routers_answer_alike_and_one_outlives_the_other(containers: Containers) -> None:
    first, second = containers.wait_healthy("router", 2)
    answers = []
    for router in (first, second):
        with Client(published(router, 8001)) as client:
            parts = [delta.text for delta in client.generate(PROMPT, max_tokens=16, temperature=0, stream=True)]
        assert len(parts) > 1
        answers.append("".join(parts))
    assert answers[0] == answers[1]
    assert "Paris" in answers[0]
    subprocess.run(["docker", "kill", first], check=True, capture_output=True)
    with Client(published(second, 8001)) as client:
        assert client.generate(PROMPT, max_tokens=16, temperature=0).choices[0].text == answers[0]


def test_every_process_is_scraped(containers: Containers) -> None:
    router = containers.ids("router")[0]
    status, text = get(published(router, 8000), "/metrics")
    assert status == 200
    assert "octavo_generation_tokens_total" in text
    scrape = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:9100/metrics').read().decode())"
    for service in ("scheduler", "worker"):
        (container,) = containers.wait_healthy(service, 1)
        assert "octavo_" in run_in(container, "python3", "-c", scrape).stdout


def test_only_the_worker_has_torch(containers: Containers) -> None:
    find = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    has = {
        service: run_in(containers.ids(service)[0], "/opt/octavo/bin/python", "-c", find).returncode == 0
        for service in ("router", "scheduler", "worker")
    }
    assert has == {"router": False, "scheduler": False, "worker": True}


def test_containers_are_not_root_and_cannot_write_the_model(containers: Containers) -> None:
    (worker,) = containers.ids("worker")
    assert run_in(worker, "id", "-u").stdout.strip() == "10001"
    assert run_in(worker, "touch", "/models/x").returncode != 0
    assert run_in(worker, "touch", "/opt/octavo/x").returncode != 0


@pytest.mark.parametrize("profiles", [(), ("gpu",), ("monitoring",), ("gpu", "monitoring")], ids="+".join)
def test_every_profile_is_well_formed(prepared: dict[str, str], profiles: tuple[str, ...]) -> None:
    chosen = [word for profile in profiles for word in ("--profile", profile)]
    services = yaml.safe_load(Containers(prepared).compose(*chosen, "config"))["services"]
    # The first version of docker-compose lists those of other profiles, too.
    started = {name for name, service in services.items() if not {*service.get("profiles", ())} - {*profiles}}
    more = {"gpu": {"worker-gpu"}, "monitoring": {"prometheus", "grafana"}}
    assert started == {"router", "scheduler", "worker"}.union(*(more[profile] for profile in profiles))
