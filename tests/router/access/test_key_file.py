"""The file of API keys: what is written is read again, what is wrong is named, and no key is in it."""

from __future__ import annotations

import hashlib
import json
import stat
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from router.access.key_file import (
    PRIORITY_MAX,
    PRIORITY_MIN,
    KeyFile,
    KeyFileError,
    PriorityRange,
    TenantLimits,
    change_key_file,
    hash_key,
    new_key,
    read_key_file,
    record_of,
)

DIGEST = hash_key("one")


def test_keys_are_256_random_bits_and_the_file_holds_their_hash(tmp_path: Path) -> None:
    key = new_key()
    assert len(key.removeprefix("octavo-")) == 43
    assert new_key() != key
    path = tmp_path / "keys.json"
    record = record_of(key, "acme", PriorityRange(-3, 9), "2025-01-31")
    change_key_file(path, lambda file: replace(file, keys=(*file.keys, record)))
    text = path.read_text()
    assert key not in text
    assert hashlib.sha256(key.encode()).hexdigest() in text
    assert record.sha256 not in repr(record)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    records = (record_of("a", "acme", PriorityRange()), record_of("b", "b.c-d", PriorityRange(PRIORITY_MIN, 5), "x"))
    written = KeyFile(records, {"acme": TenantLimits(tokens_per_minute=7), "idle": TenantLimits()})
    assert change_key_file(path, lambda _: written) == written
    assert read_key_file(path) == written
    path.chmod(0o640)
    revoked = change_key_file(path, lambda file: file.without(records[0].id))
    assert read_key_file(path).keys == revoked.keys == records[1:]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with pytest.raises(KeyFileError, match="there is no key 'nobody'"):
        revoked.without("nobody")


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"

    def add(number: int) -> None:
        record = record_of(str(number), "t", PriorityRange())
        change_key_file(path, lambda file: replace(file, keys=(*file.keys, record)))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read_key_file(path).keys) == 16


def entry(**changes: Any) -> dict[str, Any]:
    return {"id": "1", "sha256": DIGEST, "tenant": "t", **changes}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", "not JSON at line 1"),
        ("[]", "must be an object"),
        (json.dumps({"key": []}), "no field 'key'"),
        (json.dumps({"keys": {}}), "keys must be a list"),
        (json.dumps({"keys": [entry(sha256="secret-in-the-clear")]}), r"keys\[0\].sha256 must be 64 hexadecimal"),
        (json.dumps({"keys": [entry(tenant="")]}), "tenant '' must be 1 to 64"),
        (json.dumps({"keys": [entry(priority_range="9..1")]}), r"keys\[0\].priority_range"),
        (json.dumps({"keys": [entry(priority_range="0")]}), "is not BEST..WORST"),
        (json.dumps({"keys": [entry(priority_range=f"..{2**31}")]}), "must rise inside"),
        (json.dumps({"keys": [entry(), entry(id="2")]}), "same id or the same sha256"),
        (json.dumps({"keys": [entry(weight=2)]}), "no field 'weight'"),
        (json.dumps({"tenants": {"t": {"requests_per_minute": 0}}}), "at least 1"),
        (json.dumps({"tenants": {"t": {"tokens_per_minute": True}}}), "whole number"),
        (json.dumps({"tenants": {"a b": {}}}), "tenant 'a b'"),
    ],
)
def test_a_bad_file_is_refused_by_name_without_its_secrets(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(KeyFileError, match=named) as refused:
        read_key_file(path)
    assert str(refused.value).startswith(str(path))
    assert "secret-in-the-clear" not in str(refused.value)
    with pytest.raises(KeyFileError, match=named):
        change_key_file(path, lambda file: file)
    assert path.read_text() == content


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=r"none\.json: cannot be read"):
        read_key_file(tmp_path / "none.json")
    with pytest.raises(KeyFileError, match="directory cannot be written"):
        change_key_file(tmp_path / "none" / "keys.json", lambda file: file)


@pytest.mark.parametrize(
    ("text", "best", "worst"),
    [("0..", 0, PRIORITY_MAX), ("..", PRIORITY_MIN, PRIORITY_MAX), ("-5..10", -5, 10), ("..-1", PRIORITY_MIN, -1)],
)
def test_priority_ranges_are_written_as_they_are_read(text: str, best: int, worst: int) -> None:
    assert PriorityRange.parse(text) == PriorityRange(best, worst)
    assert str(PriorityRange.parse(text)) == text
