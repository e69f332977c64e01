"""GGUF weights become the tensors they were made from, converted once."""

import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from octavo.sources import ModelSource, Origin
from tests.sources import tiny_gguf
from tests.weights import tiny_checkpoints
from worker_svc.weights import Checkpoint, ExpectedTensor, WeightsError, open_checkpoint

TYPES = gguf.GGMLQuantizationType
EXPECTED = {name: ExpectedTensor(shape) for name, shape in tiny_checkpoints.shapes().items()}


def _open(path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    source = ModelSource("m", Origin.GGUF, path.parent, path)
    return open_checkpoint(source, dtype, cache_dir=path.parent / "cache")


@pytest.mark.parametrize("matrix_type", [TYPES.F32, TYPES.F16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_types_equal_the_original_exactly(
    tmp_path: Path, matrix_type: gguf.GGMLQuantizationType, dtype: torch.dtype
) -> None:
    weights = tiny_checkpoints.random_weights()
    tiny_checkpoints.write_gguf(tmp_path / "m.gguf", weights, matrix_type)
    loaded = tiny_checkpoints.load_all(_open(tmp_path / "m.gguf", dtype), dtype)
    for name, tensor in weights.items():
        assert torch.equal(loaded[name], tensor.to(dtype)), name


@pytest.mark.parametrize(
    ("matrix_type", "bound"),
    [(TYPES.BF16, 2**-8), (TYPES.Q8_0, 2**-7), (TYPES.Q4_0, 2**-3), (TYPES.Q4_1, 2**-4), (TYPES.Q5_1, 2**-5)],
)
def test_quantized_types_equal_the_original_within_their_step(
    tmp_path: Path, matrix_type: gguf.GGMLQuantizationType, bound: float
) -> None:
    """`bound` is the worst error over a block of 32 in units of its range; and the rows' order is exact."""
    weights = tiny_checkpoints.random_weights()
    tiny_checkpoints.write_gguf(tmp_path / "m.gguf", weights, matrix_type)
    checkpoint = _open(tmp_path / "m.gguf")
    for name, tensor in weights.items():
        loaded = checkpoint.load(name)
        if tensor.ndim == 1:
            assert torch.equal(loaded, tensor), name
            continue
        expected = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), matrix_type), matrix_type).copy())
        assert torch.equal(loaded, expected), name
        blocks, errors = tensor.reshape(-1, 32), (loaded - tensor).reshape(-1, 32)
        assert (errors.abs().amax(1) <= bound * (blocks.amax(1) - blocks.amin(1))).all(), name


def test_slices_join_without_a_seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny_checkpoints.random_weights()
    tiny_checkpoints.write_gguf(tmp_path / "m.gguf", weights, TYPES.F16)
    monkeypatch.setattr("worker_svc.weights.gguf_conversion._SLICE_ITEMS", 5 * tiny_checkpoints.HIDDEN)
    checkpoint = _open(tmp_path / "m.gguf")
    assert all(torch.equal(checkpoint.load(name), tensor) for name, tensor in weights.items())


def test_biases_of_q_and_k_are_reordered_with_their_rows(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    weights = tiny_checkpoints.random_weights() | {name: torch.arange(64.0)}
    tiny_checkpoints.write_gguf(tmp_path / "m.gguf", weights, TYPES.F16)
    assert torch.equal(_open(tmp_path / "m.gguf").load(name), torch.arange(64.0))


def test_qwen2_rows_stay_as_they_are(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    tiny_checkpoints.write_gguf(tmp_path / "m.gguf", weights, TYPES.F16, arch="qwen2")
    checkpoint = _open(tmp_path / "m.gguf")
    assert all(torch.equal(checkpoint.load(name), tensor) for name, tensor in weights.items())


def test_a_tied_head_is_absent_and_rotary_tables_are_left_out(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    del weights["lm_head.weight"]
    tiny_checkpoints.write_gguf(tmp_path / "m.gguf", weights | {"rope_freqs.weight": torch.ones(8)}, TYPES.F16)
    assert _open(tmp_path / "m.gguf").specs().keys() == weights.keys()


def test_the_second_start_reads_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny_checkpoints.write_gguf(path, tiny_checkpoints.random_weights(), TYPES.Q8_0)
    first = _open(path)
    (converted,) = {spec.file for spec in first.specs().values()}
    inode, status = converted.stat().st_ino, path.stat()
    # Same size, times and inode: what is remembered of the file still holds, though its bytes are gone.
    path.write_bytes(bytes(status.st_size))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    again = _open(path)
    assert {spec.file for spec in again.specs().values()} == {converted}
    assert converted.stat().st_ino == inode


def test_a_damaged_conversion_is_made_again(tmp_path: Path) -> None:
    path, weights = tmp_path / "m.gguf", tiny_checkpoints.random_weights()
    tiny_checkpoints.write_gguf(path, weights, TYPES.F16)
    (converted,) = {spec.file for spec in _open(path).specs().values()}
    converted.write_bytes(converted.read_bytes()[:-10])
    assert torch.equal(_open(path).load("lm_head.weight"), weights["lm_head.weight"])


def test_processes_that_start_together_convert_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    tiny_checkpoints.write_gguf(path, tiny_checkpoints.random_weights(), TYPES.Q4_1)
    program = (
        "import logging, sys, torch\n"
        "from pathlib import Path\n"
        "from worker_svc.weights.gguf_cache import gguf_weights_file\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stdout, format='%(message)s')\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read(1)\n"
        "print(gguf_weights_file(Path(sys.argv[1]), torch.bfloat16, Path(sys.argv[2])).stat().st_ino)\n"
    )
    command = [sys.executable, "-c", program, str(path), str(tmp_path / "cache")]
    racers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("g")
        racer.stdin.flush()
    outputs = [racer.communicate(timeout=60)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0, 0, 0]
    assert sum(output.count("converting ") for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


def test_types_that_cannot_be_dequantized_are_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", np.zeros((2, 256), dtype=np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightsError, match=r"1 tensors, token_embd\.weight the first, have ggml type I8"):
        _open(tmp_path / "m.gguf")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_tensors_of_no_known_place_are_all_named(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights() | {"blk.0.mystery.weight": torch.ones(3), "odd.weight": torch.ones(3)}
    tiny_checkpoints.write_gguf(tmp_path / "m.gguf", weights, TYPES.F16)
    with pytest.raises(WeightsError, match=r"no known place in 'llama': blk\.0\.mystery\.weight, odd\.weight"):
        _open(tmp_path / "m.gguf")


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    tiny_checkpoints.write_gguf(tmp_path / "m.gguf", tiny_checkpoints.random_weights(), TYPES.F16, arch="mamba")
    with pytest.raises(WeightsError, match=r"architecture 'mamba' are not supported; supported: llama, qwen2"):
        _open(tmp_path / "m.gguf")


def test_values_float16_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    weights = tiny_checkpoints.random_weights()
    weights["model.norm.weight"][3] = 1e6
    tiny_checkpoints.write_gguf(tmp_path / "m.gguf", weights, TYPES.F32)
    with pytest.raises(WeightsError, match=r"tensor output_norm\.weight holds 1e\+06, more than float16 can"):
        _open(tmp_path / "m.gguf", torch.float16)


def test_a_cached_start_takes_no_time_and_needs_no_gguf(tmp_path: Path) -> None:
    """Resolving and opening, in a process of its own that has torch already."""
    writer = tiny_gguf.start_llama(tmp_path / "m.gguf", 305)
    tiny_gguf.add_sentencepiece_vocabulary(writer)
    tiny_gguf.finish(writer)
    program = (
        "import sys, time, torch\n"
        "from pathlib import Path\n"
        "before = time.process_time()\n"
        "from octavo.sources import resolve\n"
        "from worker_svc.weights import open_checkpoint\n"
        "cache = Path(sys.argv[2])\n"
        "open_checkpoint(resolve(sys.argv[1], cache_dir=cache), torch.bfloat16, cache_dir=cache)\n"
        "print(time.process_time() - before, *sorted({'gguf', 'tokenizers'} & sys.modules.keys()))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "m.gguf"), str(tmp_path / "cache")]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in range(2)
    )
    assert first[1:] == ["gguf", "tokenizers"]
    assert second[1:] == []
    assert float(second[0]) < 0.3
