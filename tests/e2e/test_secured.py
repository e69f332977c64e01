"""Whole stacks behind keys, TLS on every connection and CURVE on the token path, without a model."""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from octavo import Client, Tls
from octavo.cli import main
from octavo.client import Unauthenticated
from octavo.options import DEFAULT_MODEL
from tests.e2e.stack import children_of, eventually, serving, starting
from tests.fakes.certificates import Authority

pytestmark = pytest.mark.e2e

SECRET = "canary-single-key"
COSTS = "step_ms=1,prefill_tokens_per_s=100000"


def create_key(path: str, tenant: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["keys", "create", "--key-file", path, "--tenant", tenant]) == 0
    return capsys.readouterr().out.strip()


def test_f70_a_tenants_guesses_at_anothers_prompt_look_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Right and wrong ones take the whole prompt's time and find nothing, with the owner's salt as without."""
    path, salt = str(tmp_path / "keys.json"), "the owner's"
    owner, rival = (create_key(path, tenant, capsys) for tenant in ("owner", "rival"))
    tokens_per_s = 5000.0
    costs = f"step_ms=1,prefill_tokens_per_s={tokens_per_s}"
    secret, wrong = "The owner's secret is in here. " * 40, "What the rival thinks it may be. " * 40

    def ask(client: Client, prompt: str, salt: str) -> tuple[int, float]:
        """Cached tokens, and the time to the first token in those that the whole prompt takes."""
        begun = time.perf_counter()
        stream = client.generate(prompt, max_tokens=2, ignore_eos=True, cache_salt=salt, stream=True)
        deltas = iter(stream)
        next(deltas)
        took_s = time.perf_counter() - begun
        assert len(list(deltas)) <= 2
        usage = stream.result.usage
        return usage.cached_tokens, took_s * tokens_per_s / usage.prompt_tokens

    with (
        serving(DEFAULT_MODEL, "--simulate", "--simulated-costs", costs, "--key-file", path) as stack,
        Client(stack.grpc, api_key=owner) as mine,
        Client(stack.grpc, api_key=rival) as theirs,
    ):
        assert [ask(mine, secret, each)[0] for each in ("", salt)] == [0, 0]
        for guess in (secret, wrong):
            for own_salt in ("", salt, "another"):
                num_cached, share = ask(theirs, guess, own_salt)
                assert (num_cached, share > 1) == (0, True)
        assert min(ask(mine, secret, each)[0] for each in ("", salt)) > 200


def test_everything_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", SECRET)
    keys = str(tmp_path / "keys.json")
    key = create_key(keys, "acme", capsys)
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
