"""Collecting what the doctor alone looks at, from made-up trees and from this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.checks.collect_host import directory_facts, host_facts, with_tokenizer
from octavo.checks.types import ModelFacts, TokenizerFacts
from octavo.commands.doctor_model import write_tiny_model


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_a_directory_that_is_not_there_yet_has_the_room_of_the_one_above(tmp_path: Path) -> None:
    found = directory_facts(tmp_path / "a/b")
    assert (found.path, found.is_writable) == (str(tmp_path / "a/b"), True)
    assert found.free_bytes > 0
    write(tmp_path / "file", "")
    assert not directory_facts(tmp_path / "file/b").is_writable


def test_this_machine_can_be_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    found = host_facts()
    assert found.num_present_cpus >= 1
    assert found.cache.path == str(tmp_path)


def test_the_tokenizer_is_held_to_the_weights(tmp_path: Path) -> None:
    model = ModelFacts("m", str(write_tiny_model(tmp_path)), None, (), "float32", 512, 512, None, None)
    assert with_tokenizer(model).tokenizer == TokenizerFacts(257, 256, 257, None)
    assert with_tokenizer(replace(model, directory=None)).tokenizer is None
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", json.dumps({**config, "vocab_size": 200}))
    found = with_tokenizer(model).tokenizer
    assert found is not None
    assert (found.highest_token_id, found.num_rows) == (256, 200)
    write(tmp_path / "tokenizer.json", "{")
    broken = with_tokenizer(model).tokenizer
    assert broken is not None
    assert broken.problem is not None
    assert "tokenizer.json: not JSON" in broken.problem
