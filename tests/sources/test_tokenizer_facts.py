"""Facts of tokenizers: the hash follows what changes ids, the end set is a union."""

import json
from pathlib import Path

import pytest

from octavo.sources import ModelSource, SourceError, end_token_ids, tokenizer_hash, vocabulary_facts


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    _write(tmp_path, "config.json", {"eos_token_id": 1})
    _write(tmp_path, "generation_config.json", {"eos_token_id": [2, 3]})
    _write(tmp_path, "tokenizer_config.json", {"eos_token": {"content": "<end>"}})
    _write(
        tmp_path,
        "tokenizer.json",
        {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": [{"id": 9, "content": "<end>"}]},
    )
    return tmp_path


def test_f58_the_end_set_is_the_union_of_three_files(directory: Path, smollm2: ModelSource) -> None:
    assert end_token_ids(directory) == {1, 2, 3, 9}
    assert end_token_ids(smollm2.directory) == {2}
    (directory / "generation_config.json").unlink()
    assert end_token_ids(directory) == {1, 9}
    _write(directory, "config.json", {"text_config": {"eos_token_id": 7}})
    assert end_token_ids(directory) == {7, 9}
    _write(directory, "tokenizer_config.json", {"eos_token": None})
    _write(directory, "config.json", {})
    assert end_token_ids(directory) == frozenset()


def test_an_eos_token_may_stand_in_the_special_tokens_map(directory: Path) -> None:
    (directory / "tokenizer_config.json").unlink()
    _write(directory, "special_tokens_map.json", {"eos_token": "c"})
    assert end_token_ids(directory) == {1, 2, 3}


@pytest.mark.parametrize("value", ["2", -1, 1.5, True, [1, "2"], {"id": 1}])
def test_an_end_that_is_no_id_is_refused(directory: Path, value: object) -> None:
    _write(directory, "config.json", {"eos_token_id": value})
    with pytest.raises(SourceError, match=r"config\.json: eos_token_id is "):
        end_token_ids(directory)


def test_an_eos_token_the_tokenizer_lacks_is_refused(directory: Path) -> None:
    _write(directory, "tokenizer_config.json", {"eos_token": "<gone>"})
    with pytest.raises(SourceError, match="does not have the EOS token '<gone>'"):
        end_token_ids(directory)


def test_vocabulary_counts_added_tokens(directory: Path, smollm2: ModelSource) -> None:
    facts = vocabulary_facts(directory)
    assert (facts.num_tokens, facts.highest_token_id) == (4, 9)
    _write(directory, "tokenizer.json", {"model": {"vocab": [["a", -1.0], ["b", -2.0]]}})
    assert vocabulary_facts(directory).highest_token_id == 1
    assert vocabulary_facts(smollm2.directory).highest_token_id == 49151


def test_the_hash_follows_every_file_that_changes_ids(directory: Path) -> None:
    seen = {tokenizer_hash(directory)}
    assert tokenizer_hash(directory) in seen
    for name, content in (
        ("chat_template.jinja", "{{ messages }}"),
        ("chat_template.jinja", ""),
        ("tokenizer_config.json", "{}"),
        ("tokenizer.json", "{}"),
    ):
        (directory / name).write_text(content)
        assert tokenizer_hash(directory) not in seen
        seen.add(tokenizer_hash(directory))
    _write(directory, "config.json", {"eos_token_id": 5})
    assert tokenizer_hash(directory) in seen


def _write(directory: Path, name: str, content: object) -> None:
    (directory / name).write_text(json.dumps(content))
