"""What is remembered of a tokenizer equals what its files say, and is forgotten as soon as one of them changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from worker_svc.tokenizer_facts import TokenizerFacts, tokenizer_facts


@pytest.fixture
def directory(tiny_directory: Path, tmp_path: Path) -> Path:
    return shutil.copytree(tiny_directory, tmp_path / "model")


def test_facts_are_remembered(directory: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    found = tokenizer_facts(directory, cache)
    (memory,) = (cache / "tokenizers").iterdir()
    assert tokenizer_facts(directory, cache) == found == tokenizer_facts(directory, tmp_path / "other")
    # That they come from there, and nothing else does: an entry that says otherwise is believed.
    memory.write_text(json.dumps({"highest_token_id": 3, "end_token_ids": [1], "probe_token_ids": [2, 0]}))
    assert tokenizer_facts(directory, cache) == TokenizerFacts(3, (1,), (2, 0))


@pytest.mark.parametrize(
    "spoiled", ["", "[]", '{"highest_token_id": 3}', '{"highest_token_id": 3, "end_token_ids": 5}']
)
def test_an_entry_that_cannot_be_read_is_made_again(directory: Path, tmp_path: Path, spoiled: str) -> None:
    found = tokenizer_facts(directory, tmp_path)
    (memory,) = (tmp_path / "tokenizers").iterdir()
    memory.write_text(spoiled)
    assert tokenizer_facts(directory, tmp_path) == found


def test_another_end_in_the_config_is_noticed(directory: Path, tmp_path: Path) -> None:
    before = tokenizer_facts(directory, tmp_path)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [7, 9999]}))
    after = tokenizer_facts(directory, tmp_path)
    assert after.end_token_ids != before.end_token_ids
    assert {7, 9999} <= set(after.end_token_ids)
