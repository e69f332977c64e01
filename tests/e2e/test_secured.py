"""A whole stack behind keys, TLS on every connection and CURVE on the token path, without a model."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from octavo import Client, Tls
from octavo.cli import main
from octavo.client import Unauthenticated
from octavo.options import DEFAULT_MODEL
from tests.e2e.stack import children_of, eventually, starting
from tests.fakes.certificates import Authority

pytestmark = pytest.mark.e2e

SECRET = "canary-single-key"
COSTS = "step_ms=1,prefill_tokens_per_s=100000"


def test_everything_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", SECRET)
    keys = str(tmp_path / "keys.json")
    assert main(["keys", "create", "--key-file", keys, "--tenant", "acme"]) == 0
    key = capsys.readouterr().out.strip()
    public, internal = Authority(tmp_path / "public"), Authority(tmp_path / "internal")
    shown, inside = public.issue("server"), internal.issue("stack")
    operator = internal.issue("operator", "octavo-operator")
    options = ["--simulate", "--simulated-costs", COSTS, "--zmq-curve", "on", "--key-file", keys]
    options += ["--tls-cert", shown.cert, "--tls-key", shown.key, "--internal-tls-ca", internal.ca]
    options += ["--internal-tls-cert", inside.cert, "--internal-tls-key", inside.key]
    with starting(DEFAULT_MODEL, *options) as stack:
        eventually(lambda: "Talk to it" in stack.log or stack.process.poll() is not None, 120, "the stack is ready")
        assert stack.process.poll() is None, stack.log
        for pid in children_of(stack.process.pid):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            assert SECRET not in command
            assert (SECRET in Path(f"/proc/{pid}/environ").read_text()) == ("\0router\0" in command)
        for given in (SECRET, key):
            with Client(stack.grpc, api_key=given, tls=Tls(public.ca)) as client:
                text = client.generate("Once upon a time", max_tokens=16, temperature=0).text
                assert text.startswith(" This text was made up by a simulated worker")
        # Another tenant finds nothing of what this one has asked, and by the answer's account it learns nothing of it.
        cached = []
        for given in (key, key, SECRET):
            with Client(stack.grpc, api_key=given, tls=Tls(public.ca)) as client:
                cached.append(client.generate("One tenant's secret. " * 20, max_tokens=1).usage.cached_tokens)
        assert cached[0] == cached[2] == 0
        assert cached[1] > 0
        with Client(stack.grpc, api_key="wrong", tls=Tls(public.ca)) as client, pytest.raises(Unauthenticated):
            client.models()
        context = ssl.create_default_context(cafile=public.ca)
        address = f"https://127.0.0.1:{stack.http_port}"
        request = urllib.request.Request(f"{address}/v1/models", headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, context=context, timeout=30) as answer:
            assert json.load(answer)["data"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{address}/metrics", context=context, timeout=30)
        assert refused.value.code == 401
        scheduler = ["--scheduler-address", f"127.0.0.1:{stack.scheduler_port}", "--internal-tls-ca", internal.ca]
        mine = ["--internal-tls-cert", operator.cert, "--internal-tls-key", operator.key]
        assert main(["ctl", *scheduler, *mine, "replicas"]) == 0
        assert DEFAULT_MODEL in capsys.readouterr().out
        assert main(["ctl", *scheduler[:2], "replicas"]) == 1
        assert "no scheduler answers" in capsys.readouterr().err
        assert stack.stop() == 0
        for secret in (SECRET, key):
            assert secret not in stack.log
    assert os.environ["OCTAVO_API_KEY"] == SECRET
