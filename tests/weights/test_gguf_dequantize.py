"""Quantized blocks become the values that slow decoders read from the same bytes, through the whole conversion."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from octavo.sources import ModelSource, Origin
from tests.sources import tiny_gguf
from tests.weights.ggml_blocks import DECODERS, HALVES
from worker_svc.weights import open_checkpoint

_NUM_ROWS, _ROW_ITEMS = 6, 512


def _random_blocks(name: str, num_blocks: int) -> list[bytes]:
    """Any bits, with scales of moderate size of either sign."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    source = random.Random(name)
    blocks = []
    for _ in range(num_blocks):
        block = bytearray(source.randbytes(block_bytes))
        for at in HALVES[name]:
            struct.pack_into("<e", block, at, source.uniform(-0.1, 0.1))
        blocks.append(bytes(block))
    return blocks


@pytest.mark.parametrize("name", DECODERS)
def test_blocks_become_what_a_slow_decoder_reads(tmp_path: Path, name: str) -> None:
    ggml_type = gguf.GGMLQuantizationType[name]
    block_items, block_bytes = gguf.GGML_QUANT_SIZES[ggml_type]
    blocks = _random_blocks(name, _NUM_ROWS * _ROW_ITEMS // block_items)
    stored = np.frombuffer(b"".join(blocks), dtype=np.uint8).reshape(_NUM_ROWS, _ROW_ITEMS // block_items * block_bytes)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", stored, raw_dtype=ggml_type)
    tiny_gguf.finish(writer)
    source = ModelSource("m", Origin.GGUF, tmp_path, tmp_path / "m.gguf")
    loaded = open_checkpoint(source, torch.float32, cache_dir=tmp_path / "cache").load("model.embed_tokens.weight")
    expected = [value for block in blocks for value in DECODERS[name](block)]
    assert loaded.shape == (_NUM_ROWS, _ROW_ITEMS)
    # A product and a difference in float32, of terms up to 0.1 * 63 * 63: each rounds once or twice.
    np.testing.assert_allclose(loaded.numpy().reshape(-1), expected, rtol=3e-7, atol=1e-4 if "K" in name else 1e-6)


def test_interleaved_rows_are_whole_in_quantized_types(tmp_path: Path) -> None:
    """Llama's rows are put in order as blocks, before they are decoded."""
    blocks = _random_blocks("Q4_K", 8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(2)
    stored = np.frombuffer(b"".join(blocks), dtype=np.uint8).reshape(8, -1)
    writer.add_tensor("blk.0.attn_q.weight", stored, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    tiny_gguf.finish(writer)
    source = ModelSource("m", Origin.GGUF, tmp_path, tmp_path / "m.gguf")
    name = "model.layers.0.self_attn.q_proj.weight"
    loaded = open_checkpoint(source, torch.float32, cache_dir=tmp_path / "cache").load(name)
    # Two heads of four rows: the even stored rows are the first half of a head.
    for row, stored_row in enumerate((0, 2, 1, 3, 4, 6, 5, 7)):
        np.testing.assert_allclose(loaded[row].numpy(), DECODERS["Q4_K"](blocks[stored_row]), rtol=3e-7, atol=1e-4)
