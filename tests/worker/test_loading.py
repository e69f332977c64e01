"""The phases of the start on tiny checkpoints: what is found, what stops it, what is only warned of."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.cpu import unavailable_reason
from octavo.internal.v1 import types_pb2
from octavo.phases import Phase, Phases
from octavo.process import StartError
from tests.fakes.checkpoint_files import ModelFiles, write_model
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, random_tensors, tiny_config
from tests.fakes.tiny_tokenizers import tiny_tokenizer
from worker_svc.config import WorkerConfig
from worker_svc.loading import LoadedWorker, load, served_name

SMALL = WorkerConfig(num_kv_blocks=64, max_num_seqs=4, kernels="reference", num_threads=1)


def start(directory: Path, config: WorkerConfig = SMALL) -> LoadedWorker:
    return load(replace(config, model=str(directory)), Phases())


@pytest.fixture
def model(tiny_directory: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint that a test may spoil."""
    return shutil.copytree(tiny_directory, tmp_path / "model")


def change(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_worker_says_what_it_holds(model: Path) -> None:
    change(model / "config.json", eos_token_id=[5, 9999])
    hello = start(model).hello
    assert (hello.num_device_blocks, hello.num_slots, hello.max_step_tokens, hello.block_size) == (64, 4, 512, 16)
    assert (hello.model.name, hello.model.vocab_size, hello.model.max_model_len) == ("model", TINY_VOCAB_SIZE, 512)
    # The config's and the tokenizer's; an id that cannot be sampled is not among them.
    assert list(hello.model.end_token_ids) == [0, 5]
    assert hello.model.fingerprint
    assert hello.model.numerics
    assert hello.model.tokenizer_hash


def test_phases_come_in_order_and_count_tensors(model: Path) -> None:
    seen: list[Phase] = []
    load(replace(SMALL, model=str(model)), Phases(seen.append))
    assert list(dict.fromkeys(phase.name for phase in seen)) == ["model", "tokenizer", "weights", "kv", "warm-up"]
    counts = [phase.done for phase in seen if phase.name == "weights" and phase.done is not None]
    assert counts == sorted(counts)
    assert counts[-1] == len(random_tensors(TinyLlama(num_layers=1)))


def test_fingerprints_tell_models_and_numerics_apart(model: Path, tmp_path: Path) -> None:
    first = start(model).hello.model
    change(model / "config.json", transformers_version="9.9", _name_or_path="elsewhere")
    same = start(model).hello.model
    half = start(model, replace(SMALL, dtype="bfloat16")).hello.model
    other = tmp_path / "other"
    shape = TinyLlama(num_layers=1, seed=9)
    write_model(other, ModelFiles(tiny_config(shape), random_tensors(shape), tiny_tokenizer([])))
    different = start(other).hello.model
    assert (same.fingerprint, same.numerics) == (first.fingerprint, first.numerics)
    assert half.fingerprint == first.fingerprint
    assert half.numerics != first.numerics
    assert different.fingerprint != first.fingerprint


def test_a_served_length_that_turns_keys_otherwise_is_another_model(model: Path) -> None:
    def fingerprint(max_model_len: int) -> str:
        return start(model, replace(SMALL, max_model_len=max_model_len)).hello.model.fingerprint

    assert fingerprint(128) == fingerprint(512)
    change(model / "config.json", rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert fingerprint(128) != fingerprint(1024)


def test_token_ids_beyond_the_embedding_stop_the_start(model: Path) -> None:
    tiny_tokenizer([f"piece{n}" for n in range(8)]).save(str(model / "tokenizer.json"))
    with pytest.raises(StartError, match=r"token id 264, the embedding has 264 rows"):
        start(model)


def test_surplus_embedding_rows_are_padding(model: Path) -> None:
    assert start(model).hello.model.vocab_size < json.loads((model / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize(
    ("config", "fields", "message"),
    [
        (replace(SMALL, max_model_len=1000), {}, "--max-model-len 1000 is more than the model's 512 positions"),
        (SMALL, {"architectures": ["T5Model"]}, "T5Model, which is not supported"),
        (SMALL, {"num_hidden_layers": 2}, "model.layers.1.input_layernorm.weight"),
        (SMALL, {"torch_dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        (replace(SMALL, num_kv_blocks=10**9), {}, "does not fit"),
    ],
)
def test_what_stops_a_start_is_named(model: Path, config: WorkerConfig, fields: dict[str, Any], message: str) -> None:
    change(model / "config.json", **fields)
    with pytest.raises(StartError) as caught:
        start(model, config)
    assert message in str(caught.value)


def test_weights_that_answer_not_a_number_stop_the_start(model: Path) -> None:
    shape = TinyLlama(num_layers=1)
    tensors = random_tensors(shape)
    tensors["model.norm.weight"][3] = float("nan")
    write_model(model, ModelFiles(tiny_config(shape), tensors, tiny_tokenizer([])))
    with pytest.raises(StartError, match="NaN or infinity"):
        start(model)


def test_a_model_no_better_than_guessing_is_warned_of(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="worker_svc"):
        start(model)
    assert "tokenizer and weights may not belong together" in caplog.text


@pytest.mark.parametrize("config", [replace(SMALL, num_kv_blocks=1), replace(SMALL, max_model_len=2)])
def test_the_warm_up_fits_the_smallest_worker(model: Path, config: WorkerConfig) -> None:
    assert start(model, config).runner.num_live_rows == 0


@pytest.mark.parametrize(
    ("model", "name"), [("org/model", "model"), ("/a/b/model/", "model"), ("m.gguf", "m.gguf"), ("SmolLM2", "SmolLM2")]
)
def test_served_names_are_the_last_part(model: str, name: str) -> None:
    assert served_name(model) == name


def test_an_fp8_cache_holds_more_tokens_and_says_how_many(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "worker_svc")
    sized = replace(SMALL, num_kv_blocks=None, kv_cache_memory=2**18)
    plain, narrow = start(model, sized), start(model, replace(sized, kv_cache_dtype="fp8_e4m3"))
    assert narrow.hello.num_device_blocks == 4 * plain.hello.num_device_blocks
    gained = 16 * (narrow.hello.num_device_blocks - plain.hello.num_device_blocks)
    assert f"in fp8_e4m3, {gained} tokens more than in float32" in caplog.text
    assert narrow.hello.model.numerics != plain.hello.model.numerics
    assert narrow.hello.model.fingerprint == plain.hello.model.fingerprint


@pytest.mark.skipif(unavailable_reason() is not None, reason="the cpu kernels are not built")
def test_kernels_that_hold_no_fp8_cache_say_so(model: Path) -> None:
    with pytest.raises(StartError, match=r"--kv-cache-dtype fp8_e4m3: the cpu kernels .*--kernels reference"):
        start(model, replace(SMALL, kernels="cpu", kv_cache_dtype="fp8_e4m3"))


def test_a_closed_worker_takes_no_more_grammars(model: Path) -> None:
    loaded = start(model)
    loaded.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        loaded.grammars.start(types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_REGEX, text="a+"), [])
