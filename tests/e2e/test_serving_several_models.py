"""One stack serves several models: workers of each, one router for all, and aliases that operators change."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from octavo.client import Client
from octavo.commands.doctor_model import write_tiny_model
from octavo.ports import free_port
from tests.e2e.stack import Stack, eventually, serving

pytestmark = pytest.mark.e2e


def complete(stack: Stack, model: str) -> dict[str, Any]:
    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"{stack.http}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def test_two_models_and_an_alias_over_them(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, second = write_tiny_model(tmp_path / "first", seed=0), write_tiny_model(tmp_path / "second", seed=1)
    port = free_port("127.0.0.1")
    options = ("--model", f"other={second}", "--num-kv-blocks", "64", "--scheduler-port", str(port))
    with serving(str(first), *options) as stack, Client(stack.grpc) as client:
        eventually(lambda: any(line.startswith("Octavo serves") for line in stack.lines), 60, "both models are ready")
        assert "Octavo serves first, other" in stack.log
        assert sorted({replica.model for replica in stack.replicas()}) == ["first", "other"]
        said = {name: complete(stack, name)["choices"][0]["text"] for name in ("first", "other")}
        assert said["first"] != said["other"], "two sets of random weights"
        for name, text in said.items():
            with Client(stack.grpc, model=name) as asking:
                assert asking.generate("a", max_tokens=4, temperature=0.0).choices[0].text == text
        with pytest.raises(urllib.error.HTTPError) as unknown:
            complete(stack, "third")
        assert unknown.value.code == 404
        assert "served: first, other" in json.load(unknown.value)["error"]["message"]

        def ctl(*words: str) -> None:
            command = [sys.executable, "-m", "octavo", "ctl", "--scheduler-address", f"127.0.0.1:{port}", *words]
            subprocess.run(command, check=True, capture_output=True, timeout=60)

        ctl("set-alias", "chat", "other=1", "first=0")
        eventually(lambda: "chat" in {model.name for model in client.models()}, 30, "the alias is known")
        assert complete(stack, "chat")["model"] == "other"
        ctl("set-alias", "chat", "first=1")
        eventually(lambda: complete(stack, "chat")["model"] == "first", 30, "the alias is changed")
        ctl("remove-alias", "chat")
        eventually(lambda: "chat" not in {model.name for model in client.models()}, 30, "the alias is gone")
        with urllib.request.urlopen(f"{stack.http}/metrics", timeout=30) as response:
            metrics = response.read().decode()
        assert 'model="first"' in metrics
        assert 'model="other"' in metrics
        assert stack.stop() == 0
