"""Fused layers: the bits of one call a kernel, with every option of a layer, on any threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_steps import int32, ragged_batch
from torch import Tensor

from kernels.api import AttentionSpec, FusableLayer, GatedActivation, KVCache, KVCacheSpec, QKNorm, RopeTable
from kernels.cpu import CpuBackend

BF16, FP32 = torch.bfloat16, torch.float32
HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK = 48, 80, 3, 1, 16, 4
EPS, NUM_LAYERS = 1e-5, 3
NUM_BLOCKS = 32
# (query length, context length, blocks) of each sequence: few tokens, whose layers all threads compute together; many
# that decode, which threads share out; short chunks among them; and a chunk too long to be one thread's part.
Rows = list[tuple[int, int, tuple[int, ...]]]
FEW: Rows = [(5, 9, (2, 0, 5)), (1, 7, (4, 1))]
DECODING: Rows = [(1, 2 + i % 7, (2 * i, 2 * i + 1)) for i in range(13)]
CHUNKS: Rows = [(1 + i % 3, 8 - i % 3, (2 * i, 31 - 2 * i)) for i in range(12)]
UNEVEN: Rows = [(20, 24, (26, 27, 28, 29, 30, 31)), *DECODING]


def randn(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rope() -> RopeTable:
    angles = torch.outer(torch.arange(32), 10000.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
    return RopeTable(angles.cos(), angles.sin())


def plain_layers(backend: CpuBackend, dtype: torch.dtype) -> list[FusableLayer]:
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    shapes = ((width, HIDDEN), (HIDDEN, NUM_HEADS * HEAD_DIM), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE))
    layers = []
    for index in range(NUM_LAYERS):
        weights = [randn(*shape, seed=10 * index + i, dtype=dtype) / 4 for i, shape in enumerate(shapes)]
        qkv, output, gate_up, down = (backend.pack_linear(weight, None) for weight in weights)
        mlp_norm, next_norm = randn(2, HIDDEN, seed=10 * index + 5, dtype=dtype)
        attention = AttentionSpec(NUM_HEADS, HEAD_DIM**-0.5)
        layers.append(
            FusableLayer(qkv, None, rope(), attention, output, None, mlp_norm, gate_up, down, None, next_norm)
        )
    return layers


def rich_layers(backend: CpuBackend, dtype: torch.dtype) -> list[FusableLayer]:
    """With norms of heads and of what blocks give, in fp32, a bias, a window on one layer, and soft caps."""
    layers = []
    for index, layer in enumerate(plain_layers(backend, dtype)):
        q_norm, k_norm = randn(2, HEAD_DIM, seed=70 + index, dtype=dtype)
        attention_norm, mlp_norm = randn(2, HIDDEN, seed=80 + index)
        biased = backend.pack_linear(randn(HIDDEN, INTERMEDIATE, seed=90, dtype=dtype), randn(HIDDEN, seed=91))
        layers.append(
            replace(
                layer,
                qk_norm=QKNorm(q_norm, k_norm, 1e-6),
                attention=AttentionSpec(NUM_HEADS, 0.3, window=3 if index == 1 else None, soft_cap=5.0),
                attention_out_norm=attention_norm,
                down=biased,
                mlp_out_norm=mlp_norm,
            )
        )
    return layers


def filled_cache(backend: CpuBackend, dtype: torch.dtype) -> KVCache:
    cache = backend.allocate_kv_cache(KVCacheSpec(NUM_LAYERS, NUM_BLOCKS, BLOCK, NUM_KV_HEADS, HEAD_DIM, dtype))
    for layer in range(NUM_LAYERS):
        blocks = randn(2, NUM_BLOCKS, NUM_KV_HEADS, BLOCK, HEAD_DIM, seed=100 + layer, dtype=dtype)
        backend.import_blocks(cache, layer, range(NUM_BLOCKS), blocks)
    return cache


def one_by_one(
    backend: CpuBackend,
    layers: list[FusableLayer],
    activation: GatedActivation,
    rows: Rows,
    x: Tensor,
    residual: Tensor,
) -> tuple[Tensor, Tensor, KVCache]:
    """The twin: a call for each kernel."""
    cache = filled_cache(backend, x.dtype)
    plan = backend.plan_attention(ragged_batch(rows), cache)
    gated = backend.gelu_mul if activation == "gelu_tanh" else backend.silu_mul
    residual = residual.clone()
    for index, layer in enumerate(layers):
        qkv = backend.linear(x, layer.qkv)
        backend.rope_write_kv(qkv, cache, index, plan, layer.rope, layer.qk_norm)
        x = backend.linear(backend.attention(qkv, cache, index, plan, layer.attention), layer.output)
        if layer.attention_out_norm is not None:
            x = backend.rms_norm(x, layer.attention_out_norm, EPS)
        x = backend.add_rms_norm(x, residual, layer.mlp_norm, EPS)
        x = backend.linear(gated(backend.linear(x, layer.gate_up)), layer.down)
        if layer.mlp_out_norm is not None:
            x = backend.rms_norm(x, layer.mlp_out_norm, EPS)
        x = backend.add_rms_norm(x, residual, layer.next_norm, EPS)
    return x, residual, cache


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("rows", [FEW, DECODING, CHUNKS, UNEVEN], ids=["few", "decoding", "chunks", "uneven"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("make_layers", "activation"), [(plain_layers, "silu"), (rich_layers, "gelu_tanh")])
def test_fused_layers_give_the_bits_of_single_kernels(
    variant: str, make_layers: object, activation: GatedActivation, dtype: torch.dtype, rows: Rows, num_threads: int
) -> None:
    backend = CpuBackend(num_threads, variant)
    layers: list[FusableLayer] = make_layers(backend, dtype)  # type: ignore[operator]
    fused = backend.fuse_layers(layers, EPS, activation)
    if fused is None:
        assert "onednn" in backend.info.variant
        pytest.skip("weights of this type go through oneDNN here")
    x, residual = randn(2, sum(count for count, *_ in rows), HIDDEN, seed=3, dtype=dtype)
    for count in (NUM_LAYERS, 1, 0):
        expected, expected_residual, expected_cache = one_by_one(backend, layers[:count], activation, rows, x, residual)
        got, got_residual, cache = x.clone(), residual.clone(), filled_cache(backend, dtype)
        fused(count, got, got_residual, cache, backend.plan_attention(ragged_batch(rows), cache))
        assert torch.equal(got, expected)
        assert torch.equal(got_residual, expected_residual)
        for layer in range(NUM_LAYERS):
            own, other = (backend.export_blocks(each, layer, range(NUM_BLOCKS)) for each in (cache, expected_cache))
            assert torch.equal(own, other)


def test_layers_that_do_not_fit_are_refused(backend: CpuBackend) -> None:
    layers = plain_layers(backend, FP32)
    narrow = replace(layers[1], down=layers[1].output)
    with pytest.raises(ValueError, match="chained by their widths"):
        backend.fuse_layers([layers[0], narrow], EPS, "silu")
    with pytest.raises(ValueError, match="a norm's weight"):
        backend.fuse_layers([replace(layers[0], next_norm=torch.ones(HIDDEN + 1))], EPS, "silu")
    with pytest.raises(ValueError, match="must be positive"):
        backend.fuse_layers([replace(layers[0], attention=AttentionSpec(NUM_HEADS, 0.0))], EPS, "silu")


def test_steps_that_do_not_fit_are_refused(backend: CpuBackend) -> None:
    fused = backend.fuse_layers(plain_layers(backend, FP32), EPS, "silu")
    assert fused is not None
    cache = filled_cache(backend, FP32)
    plan = backend.plan_attention(ragged_batch(FEW), cache)
    x, residual = randn(2, 6, HIDDEN, seed=3)
    with pytest.raises(ValueError, match="residual is"):
        fused(1, x, residual[:5], cache, plan)
    with pytest.raises(ValueError, match="the layers take torch"):
        fused(1, x.to(BF16), residual, cache, plan)
    with pytest.raises(ValueError, match="4 layers at positions"):
        fused(4, x, residual, cache, plan)
    late = replace(ragged_batch([(6, 40, tuple([0] * 10))]), positions=int32(range(34, 40)))
    with pytest.raises(ValueError, match="positions up to 39"):
        fused(1, x, residual, cache, backend.plan_attention(late, cache))
