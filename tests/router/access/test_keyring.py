"""The keys a router takes: who they stand for, and what becomes of them when the file changes."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.process import StartError
from router.access.key_file import (
    ANY_PRIORITY,
    KeyFile,
    PriorityRange,
    TenantLimits,
    change_key_file,
    new_key,
    record_of,
)
from router.access.keyring import ANYBODY, Caller, Keyring


def add(path: Path, tenant: str, priorities: str = "0..") -> str:
    key = new_key()
    record = record_of(key, tenant, PriorityRange.parse(priorities))
    change_key_file(path, lambda file: replace(file, keys=(*file.keys, record)))
    return key


def test_each_key_stands_for_its_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    acme, other = add(path, "acme"), add(path, "other", "-5..5")
    ring = Keyring(key_file=str(path))
    assert ring.asks_for_keys
    found = ring.find(acme)
    assert found is not None
    assert (found.tenant, found.priorities) == ("acme", PriorityRange(0))
    assert ring.find(other) == Caller("other", PriorityRange(-5, 5), ring.find(other).key_id)  # type: ignore[union-attr]
    for wrong in ("", acme[:-1], acme + "x", acme.upper(), "x" * 10_000, "\ud800"):
        assert ring.find(wrong) is None


def test_no_key_is_asked_for_where_there_is_none() -> None:
    ring = Keyring()
    assert not ring.asks_for_keys
    assert ANYBODY.priorities == ANY_PRIORITY


def test_the_single_key_is_the_one_tenant_and_stands_beside_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = add(path, "acme")
    ring = Keyring("s3cret", str(path))
    single, filed = ring.find("s3cret"), ring.find(key)
    assert single is not None
    assert filed is not None
    assert (single.tenant, filed.tenant) == ("", "acme")
    assert single.priorities == PriorityRange(0)
    assert "s3cret" not in str(vars(ring))


def test_a_file_without_keys_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    change_key_file(path, lambda _: KeyFile())
    ring = Keyring(key_file=str(path))
    assert ring.asks_for_keys
    assert ring.find("") is None


def test_a_changed_file_is_taken_and_revoked_keys_are_gone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = add(path, "acme")
    ring = Keyring(key_file=str(path))
    assert not ring.refresh()
    second = add(path, "acme")
    change_key_file(path, lambda file: replace(file, tenants={"acme": TenantLimits(3)}))
    assert ring.refresh()
    assert ring.find(second) is not None
    assert ring.limits_of("acme") == TenantLimits(3)
    assert ring.limits_of("nobody") == TenantLimits()
    record = ring.find(first)
    assert record is not None
    change_key_file(path, lambda file: file.without(record.key_id))
    assert ring.refresh()
    assert ring.find(first) is None
    assert ring.find(second) is not None


@pytest.mark.parametrize("spoil", ["garbage", "delete"])
def test_a_bad_change_keeps_the_keys_there_were(tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: str) -> None:
    path = tmp_path / "keys.json"
    key = add(path, "acme")
    ring = Keyring(key_file=str(path))
    if spoil == "delete":
        path.unlink()
    else:
        path.write_text(f'{{"keys": [{{"sha256": "{key}"}}]}}')
    with caplog.at_level(logging.WARNING):
        assert not ring.refresh()
    assert ring.find(key) is not None
    assert "old keys stay" in caplog.text
    assert key not in caplog.text
    caplog.clear()
    assert not ring.refresh()
    assert caplog.text == "", "said once, not at every look"
    change_key_file(path, lambda _: KeyFile()) if spoil == "delete" else path.write_text("{}")
    assert ring.refresh()
    assert ring.find(key) is None


def test_a_start_without_its_file_is_refused_and_a_file_for_everybody_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(StartError, match=r"--key-file .*none.json: cannot be read"):
        Keyring(key_file=str(tmp_path / "none.json"))
    path = tmp_path / "keys.json"
    add(path, "acme")
    path.chmod(0o666)
    with caplog.at_level(logging.WARNING):
        Keyring(key_file=str(path))
    assert "can be written by everybody" in caplog.text
