"""Collecting facts: from real sockets, from installed packages, from model directories on disk."""

from __future__ import annotations

import json
import socket
import struct
import sys
from pathlib import Path

import pytest

from octavo.checks.collect import (
    KvOptions,
    ModelRequest,
    PortRequest,
    kernel_facts,
    model_facts,
    package_facts,
    port_facts,
)
from octavo.checks.registry import failures, run_checks
from octavo.checks.types import KernelFacts
from octavo.cli import main
from octavo.machine import collect_machine

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "torch_dtype": "float16",
}
KV = KvOptions(block_size=16, max_num_seqs=4, num_kv_blocks=10, kv_cache_memory=None, kv_memory_fraction=0.5)


def write_model(directory: Path, config: dict[str, object], cut_bytes: int = 0) -> Path:
    """A model directory with one small tensor; `cut_bytes` are missing from the end of its weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}', encoding="utf-8")
    entry = {"w": {"dtype": "F16", "shape": [8], "data_offsets": [0, 16]}}
    header = json.dumps(entry).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(16)
    (directory / "model.safetensors").write_bytes(content[: len(content) - cut_bytes])
    return directory


def request(name: str, dtype: str = "auto", max_model_len: int | None = None) -> ModelRequest:
    return ModelRequest(name, dtype, max_model_len, 32, KV)


def test_a_sound_model_is_measured(tmp_path: Path) -> None:
    facts = model_facts(request(str(write_model(tmp_path / "m", CONFIG))), collect_machine())
    assert (facts.missing, facts.file_problems) == (None, ())
    assert (facts.dtype, facts.model_limit_tokens, facts.max_model_len_tokens) == ("float16", 128, 128)
    assert facts.kv_pool is not None
    assert facts.kv_pool.num_bytes == 10 * 2 * 2 * 2 * 4 * 16 * 2
    assert facts.memory is not None
    assert facts.memory.kv_bytes == facts.kv_pool.num_bytes


def test_options_win_over_the_checkpoint(tmp_path: Path) -> None:
    directory = str(write_model(tmp_path / "m", CONFIG))
    facts = model_facts(request(directory, "float32", 64), collect_machine())
    assert (facts.dtype, facts.max_model_len_tokens) == ("float32", 64)


def test_a_path_that_does_not_exist_is_said(tmp_path: Path) -> None:
    facts = model_facts(request(str(tmp_path / "absent")), collect_machine())
    assert facts.missing is not None
    assert str(tmp_path / "absent") in facts.missing
    assert facts.memory is None


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", CONFIG, cut_bytes=4)
    facts = model_facts(request(str(directory)), collect_machine())
    (problem,) = facts.file_problems
    assert "model.safetensors" in problem
    assert "truncated" in problem


def test_a_config_without_a_needed_field_names_it(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "num_hidden_layers"}
    facts = model_facts(request(str(write_model(tmp_path / "m", config))), collect_machine())
    (problem,) = facts.file_problems
    assert "num_hidden_layers" in problem


def test_a_quantization_that_is_not_read_is_named_before_anything_loads(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "bitsandbytes"}}
    facts = model_facts(request(str(write_model(tmp_path / "m", config))), collect_machine())
    (problem,) = facts.file_problems
    assert "quant_method 'bitsandbytes' is not supported; supported: awq" in problem


def test_an_architecture_that_is_not_supported_is_named_before_anything_loads(tmp_path: Path) -> None:
    config = {**CONFIG, "architectures": ["T5Model"]}
    facts = model_facts(request(str(write_model(tmp_path / "m", config))), collect_machine())
    (problem,) = facts.file_problems
    assert "T5Model, which is not supported; supported: Gemma2ForCausalLM, " in problem


def test_a_taken_port_names_its_owner() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        facts = port_facts(PortRequest("--http-port", "127.0.0.1", taken.getsockname()[1]))
    assert facts.in_use
    assert facts.error is None
    assert (facts.owner is not None) == (sys.platform == "linux")


def test_an_address_of_another_machine_is_an_error() -> None:
    facts = port_facts(PortRequest("--http-port", "192.0.2.1", 8000))
    assert not facts.in_use
    assert facts.error is not None
    assert facts.owner is None


def test_installed_packages_are_read_with_their_ranges() -> None:
    packages = {package.name: package for package in package_facts()}
    lowest, below = sorted(packages["grpcio"].tested_range.split(","), reverse=True)
    assert lowest.startswith(">=1.")
    assert below == "<2"
    assert "ruff" not in packages  # a tool of development
    assert "octavo" not in packages


def test_the_kernels_are_found_built_failed_or_absent(tmp_path: Path) -> None:
    assert kernel_facts(tmp_path) is None
    folder = tmp_path / "cpu"
    folder.mkdir()
    assert kernel_facts(tmp_path) == KernelFacts(False, None)
    (folder / "build_error.txt").write_text("no compiler", encoding="utf-8")
    assert kernel_facts(tmp_path) == KernelFacts(False, "no compiler")
    (folder / "octavo_kernels.so").touch()
    (folder / "build_error.txt").unlink()
    assert kernel_facts(tmp_path) == KernelFacts(True, None)


def test_the_doctor_prints_the_findings_and_fails_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--http-port", "0", "--grpc-port", "0", "--num-kv-blocks", "10"]
    sound = str(write_model(tmp_path / "m", CONFIG))
    assert main(["doctor", sound, *words]) == 0
    assert "ok       memory" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "absent"), *words]) == 1
    assert "failure  model-found" in capsys.readouterr().out


def test_a_model_that_is_missing_stops_serve_with_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    absent = str(tmp_path / "absent")
    assert main(["serve", absent, "--http-port", "0", "--grpc-port", "0", "--log-level", "error"]) == 1
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("octavo serve: model-found: ")
    assert absent in last


def test_collected_facts_pass_the_checks_they_feed(tmp_path: Path) -> None:
    from octavo.checks.collect import collect

    facts = collect([PortRequest("--http-port", "127.0.0.1", 0)], request(str(write_model(tmp_path / "m", CONFIG))))
    assert failures(run_checks(facts)) == ()
