"""Damaged model files are named, with the bytes expected and found, before anything loads them."""

import json
import re
import resource
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from octavo.sources import ModelSource, Origin, ProblemKind, SourceError, inspect_files, resolve
from octavo.sources.ggml_types import BLOCK_SIZES

LFS_POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 269060552\n"
)


@pytest.fixture
def model(tmp_path: Path) -> ModelSource:
    """A sound directory of two shards."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"model_type": "llama"}')
    (directory / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    save_file({"a": np.ones((4, 4), np.float32), "b": np.ones(3, np.float16)}, directory / "one.safetensors")
    save_file({"c": np.ones((8, 2), np.float32)}, directory / "two.safetensors")
    _write_index(directory, {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"})
    return ModelSource("model", Origin.DIRECTORY, directory, directory)


def test_sound_files_have_no_problem(model: ModelSource, smollm2: ModelSource) -> None:
    assert inspect_files(model) == ()
    assert inspect_files(smollm2) == ()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "one.safetensors", "model.safetensors.index.json"])
def test_f52_empty_absent_and_pointer_files_are_named(model: ModelSource, name: str) -> None:
    path = model.directory / name
    path.write_text(LFS_POINTER)
    (problem,) = inspect_files(model)
    assert (problem.kind, problem.path) == (ProblemKind.LFS_POINTER, path)
    assert (problem.expected_bytes, problem.actual_bytes) == (269060552, len(LFS_POINTER))
    assert "269,060,552" in str(problem)
    assert "git lfs pull" in str(problem)
    path.write_text("")
    (problem,) = inspect_files(model)
    assert (problem.kind, problem.path, problem.actual_bytes) == (ProblemKind.EMPTY, path, 0)
    path.unlink()
    problems = inspect_files(model)
    assert [problem.kind for problem in problems] == [ProblemKind.ABSENT]
    assert problems[0].path == path


def test_malformed_json_is_named(model: ModelSource) -> None:
    (model.directory / "config.json").write_text('{"model_type": ')
    (model.directory / "generation_config.json").write_text("[1]")
    (model.directory / "tokenizer.json").write_text('{"model": {"vocab": {')
    kinds = {problem.path.name: problem.kind for problem in inspect_files(model)}
    assert kinds == dict.fromkeys(("config.json", "generation_config.json", "tokenizer.json"), ProblemKind.MALFORMED)


def test_f52_a_truncated_shard_is_named_with_its_bytes(model: ModelSource) -> None:
    path = model.directory / "one.safetensors"
    whole = path.read_bytes()
    for kept in (5, 50, len(whole) - 1):
        path.write_bytes(whole[:kept])
        (problem,) = inspect_files(model)
        assert (problem.kind, problem.path, problem.actual_bytes) == (ProblemKind.TRUNCATED, path, kept)
        assert problem.expected_bytes is not None
        assert kept < problem.expected_bytes <= len(whole)
    assert problem.expected_bytes == len(whole)


@pytest.mark.parametrize("claim", [1 << 20, 1 << 40, 1 << 60, (1 << 64) - 1])
def test_f52_an_absurd_header_length_costs_nothing(model: ModelSource, claim: int) -> None:
    path = model.directory / "one.safetensors"
    path.write_bytes(claim.to_bytes(8, "little") + path.read_bytes()[8:])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (problem,) = inspect_files(model)
    assert problem.path == path
    assert f"claims a header of {claim:,} bytes" in str(problem)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["b"].update(data_offsets=[60, 66]), "overlaps"),
        (lambda header: header["b"].update(data_offsets=[68, 74]), "leaves a gap"),
        (lambda header: header["b"].update(data_offsets=[64, 1 << 60]), "offsets .* say otherwise"),
        (lambda header: header["b"].update(shape=[1 << 40, 1 << 40]), "offsets .* say otherwise"),
        (lambda header: header["b"].update(shape=[-3]), "offsets .* say otherwise"),
        (lambda header: header["b"].update(dtype="Q9"), "malformed entry"),
        (lambda header: header.update(b=3), "malformed entry"),
        (lambda header: header.pop("b"), "its header describes"),
    ],
)
def test_f52_offsets_that_do_not_fit_are_named(model: ModelSource, change: Callable[..., object], message: str) -> None:
    path = model.directory / "one.safetensors"
    whole = path.read_bytes()
    data_start = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:data_start])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[data_start:])
    problems = inspect_files(model)
    assert problems[0].path == path
    assert problems[0].kind is ProblemKind.MALFORMED
    assert re.search(message, str(problems[0]))


def test_a_tensor_the_index_places_elsewhere_is_named(model: ModelSource) -> None:
    _write_index(model.directory, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    (problem,) = inspect_files(model)
    assert problem.path == model.directory / "two.safetensors"
    assert "the index places b here" in str(problem)


def test_an_index_cannot_lead_outside(model: ModelSource) -> None:
    _write_index(model.directory, {"a": "../../secret.safetensors"})
    (problem,) = inspect_files(model)
    assert "'../../secret.safetensors', which is not a file name" in str(problem)


def test_shards_without_an_index_and_pickles_are_refused(model: ModelSource) -> None:
    (model.directory / "model.safetensors.index.json").unlink()
    (problem,) = inspect_files(model)
    assert "the index is absent" in str(problem)
    for path in model.directory.glob("*.safetensors"):
        path.unlink()
    (model.directory / "pytorch_model.bin").write_bytes(b"x")
    (problem,) = inspect_files(model)
    assert problem.kind is ProblemKind.ABSENT
    assert "unpickled" in str(problem)


def test_f52_a_truncated_gguf_is_named_with_its_bytes(smollm2: ModelSource, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    with smollm2.weights.open("rb") as stream:
        path.write_bytes(stream.read(60_000_000))
    source = ModelSource("cut", Origin.GGUF, smollm2.directory, path)
    (problem,) = inspect_files(source)
    assert (problem.kind, problem.path) == (ProblemKind.TRUNCATED, path)
    assert (problem.expected_bytes, problem.actual_bytes) == (smollm2.weights.stat().st_size, 60_000_000)
    with pytest.raises(SourceError, match=r"cut\.gguf: truncated: expected 98,362,432 bytes or more, has 60,000,000"):
        resolve(str(path), cache_dir=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_f52_other_damage_to_a_gguf_is_named(smollm2: ModelSource, tmp_path: Path) -> None:
    for content, kind in (
        (b"", ProblemKind.EMPTY),
        (LFS_POINTER.encode(), ProblemKind.LFS_POINTER),
        (b"PK\x03\x04 not a model at all, whatever its name says", ProblemKind.MALFORMED),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), ProblemKind.TRUNCATED),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 1 << 63), ProblemKind.TRUNCATED),
    ):
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        (problem,) = inspect_files(ModelSource("m", Origin.GGUF, smollm2.directory, path))
        assert (problem.kind, problem.path) == (kind, path)


def _write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_sizes_of_types_are_those_of_gguf() -> None:
    assert {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()} == BLOCK_SIZES
