"""`octavo keys`, and that secrets are on no command line, in no log and in no child but the one they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli import main
from octavo.commands.command_line import parse
from octavo.options import OptionError, differences, from_args, secret_environment, to_arguments
from octavo.stack.serve import child_specs, greeting, read_options
from router.access.key_file import read_key_file
from router.access.keyring import Keyring
from router.config import RouterConfig

SECRET = "canary-5f0c9a1e"


def test_keys_are_made_listed_limited_and_revoked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "keys.json")
    assert main(["keys", "create", "--key-file", path, "--tenant", "acme"]) == 0
    made = capsys.readouterr()
    key = made.out.strip()
    assert made.out.count("\n") == 1
    assert key not in made.err
    assert main(["keys", "create", "--key-file", path, "--tenant", "acme", "--priority-range=-5..10"]) == 0
    capsys.readouterr()
    found = Keyring(key_file=path).find(key)
    assert found is not None
    assert found.tenant == "acme"
    assert main(["keys", "limit", "acme", "--key-file", path, "--requests-per-minute", "5"]) == 0
    assert main(["keys", "limit", "acme", "--key-file", path, "--tokens-per-minute", "900"]) == 0
    assert main(["keys", "limit", "acme", "--key-file", path, "--requests-per-minute", "none"]) == 0
    assert capsys.readouterr().out.endswith(
        "acme: requests_per_minute none, tokens_per_minute 900, max_concurrent_requests none\n"
    )
    assert main(["keys", "list", "--key-file", path]) == 0
    listed = capsys.readouterr().out
    assert found.key_id in listed
    assert "-5..10" in listed
    assert "tokens_per_minute 900" in listed
    assert key not in listed
    assert all(record.sha256 not in listed for record in read_key_file(path).keys)
    assert main(["keys", "revoke", found.key_id, "--key-file", path]) == 0
    assert Keyring(key_file=path).find(key) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["create", "--tenant", "a b"], "tenant 'a b'"),
        (["revoke", "nobody"], "no key 'nobody'"),
        (["limit", "a"], "no limit is named"),
    ],
)
def test_what_cannot_be_done_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["keys", *words, "--key-file", str(tmp_path / "keys.json")]) == 1
    assert said in capsys.readouterr().err
    assert not (tmp_path / "keys.json").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["create", "--tenant", "a", "--priority-range", "high"], "priority range 'high'"),
        (["create", "--tenant", "a", "--priority-range", "0..99999999999"], "priority range '0..99999999999'"),
        (["limit", "a", "--requests-per-minute", "99999999999"], "99999999999: must be between 1 and 2147483647"),
    ],
)
def test_what_is_no_value_is_refused_with_status_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["keys", *words, "--key-file", str(tmp_path / "keys.json")])
    assert refused.value.code == 2
    assert said in capsys.readouterr().err


def test_a_secret_comes_from_the_environment_and_is_on_no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", SECRET)
    stack = read_options(["m"])
    assert stack.router.api_key == SECRET
    router, *others = child_specs(stack)
    assert router.environment == {"OCTAVO_API_KEY": SECRET}
    assert all(not child.environment for child in others)
    assert all(SECRET not in word for child in (router, *others) for word in child.command)
    for text in (repr(stack), str(differences(stack.router)), "\n".join(greeting(stack.router))):
        assert SECRET not in text
    assert "--api-key set (default unset)" in differences(stack.router)
    assert to_arguments(RouterConfig(api_key=SECRET)) == []
    monkeypatch.setenv("OCTAVO_API_KEY", "")
    assert read_options(["m"]).router.api_key is None


def test_a_key_on_the_command_line_counts_and_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "other")
    config = from_args(RouterConfig, parse("router", "", ["--api-key", SECRET]))
    assert secret_environment(config) == {"OCTAVO_API_KEY": SECRET}
    said = capsys.readouterr().err
    assert "OCTAVO_API_KEY" in said
    assert SECRET not in said
    with pytest.raises(OptionError) as refused:
        RouterConfig(api_key=f"{SECRET}\n")
    assert SECRET not in str(refused.value)


def test_the_greeting_speaks_as_the_stack_does() -> None:
    plain = "\n".join(greeting(RouterConfig()))
    assert "http://127.0.0.1:8000" in plain
    assert "Authorization" not in plain
    assert "curl http://127.0.0.1:8000/metrics" in plain
    secured = "\n".join(greeting(RouterConfig(key_file="k", tls_cert="c", tls_key="k")))
    assert "https://127.0.0.1:8000/v1/completions" in secured
    assert '"Authorization: Bearer $OCTAVO_API_KEY"' in secured
    assert "octavo chat --server 127.0.0.1:8001 --tls-ca CA.pem" in secured
    assert 'tls=octavo.Tls(ca="CA.pem")' in secured
    shown = 'curl --cacert CA.pem -H "Authorization: Bearer $OCTAVO_API_KEY" https://127.0.0.1:8000'
    assert f"{shown}/metrics" in secured
    mutual = "\n".join(greeting(RouterConfig(tls_cert="c", tls_key="k", tls_client_ca="a")))
    assert "--tls-ca CA.pem --tls-cert ME.pem --tls-key ME.key" in mutual
    assert 'tls=octavo.Tls(ca="CA.pem", cert="ME.pem", key="ME.key")' in mutual
    assert "curl --cacert CA.pem --cert ME.pem --key ME.key https://127.0.0.1:8000/metrics" in mutual


def test_the_supervisor_asks_a_port_of_its_own_where_the_public_one_would_not_answer_it() -> None:
    assert read_options(["m"]).router.health_port is None
    for words in (["--tls-cert", "c", "--tls-key", "k"], ["--allow-networks", "10.0.0.0/8"]):
        router = read_options(["m", *words]).router
        assert router.health_host == "127.0.0.1"
        assert router.health_port
    assert read_options(["m", "--tls-cert", "c", "--tls-key", "k", "--health-port", "7"]).router.health_port == 7
