"""What the C++ backend refuses before it follows an address."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_samples import RowParameters, sampling_batch
from kernel_steps import Geometry, ragged_batch

from kernels.api import AttentionSpec, KVCacheSpec
from kernels.cpu import CpuBackend, unavailable_reason
from kernels.reference import ReferenceBackend

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))

SPEC = KVCacheSpec(num_layers=2, num_blocks=4, block_size=16, num_kv_heads=2, head_dim=64, dtype=torch.float32)
GEOMETRY = Geometry(4, 2, 64)


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend(1)


@pytest.mark.parametrize(
    "spec", [replace(SPEC, block_size=3), replace(SPEC, head_dim=40), replace(SPEC, head_dim=1024)]
)
def test_cache_shapes(backend: CpuBackend, spec: KVCacheSpec) -> None:
    with pytest.raises(ValueError, match=r"(block_size 3|head_dim 40|head_dim 1024) must"):
        backend.allocate_kv_cache(spec)


def test_cache_types(backend: CpuBackend) -> None:
    with pytest.raises(ValueError, match="float64"):
        backend.allocate_kv_cache(replace(SPEC, dtype=torch.float64))


def test_qkv_of_another_shape_than_planned(backend: CpuBackend) -> None:
    cache = backend.allocate_kv_cache(SPEC)
    plan = backend.plan_attention(ragged_batch([(2, 2, [0])]), cache)
    spec, rope = GEOMETRY.spec, GEOMETRY.rope()
    for qkv in (torch.zeros(3, 512), torch.zeros(2, 500), torch.zeros(2, 1024)[:, ::2]):
        with pytest.raises(ValueError, match="qkv is"):
            backend.attention(qkv, cache, 0, plan, spec)
        with pytest.raises(ValueError, match="qkv is"):
            backend.rope_write_kv(qkv, cache, 0, plan, rope, None)
    with pytest.raises(ValueError, match="float64"):
        backend.attention(torch.zeros(2, 512).double(), cache, 0, plan, spec)
    with pytest.raises(ValueError, match="5"):
        backend.attention(torch.zeros(2, 9 * 64), cache, 0, plan, AttentionSpec(5, 1.0))
    with pytest.raises(ValueError, match="layer 2"):
        backend.attention(torch.zeros(2, 512), cache, 2, plan, spec)
    with pytest.raises(ValueError, match="positions up to 1"):
        backend.rope_write_kv(
            torch.zeros(2, 512), cache, 0, plan, replace(rope, cos=rope.cos[:1], sin=rope.sin[:1]), None
        )


def test_a_plan_for_another_cache(backend: CpuBackend) -> None:
    plan = backend.plan_attention(ragged_batch([(2, 2, [3])]), backend.allocate_kv_cache(SPEC))
    smaller = backend.allocate_kv_cache(replace(SPEC, num_blocks=2))
    with pytest.raises(ValueError, match="4 blocks of 16"):
        backend.attention(torch.zeros(2, 512), smaller, 0, plan, GEOMETRY.spec)


def test_another_backends_cache_and_weights(backend: CpuBackend) -> None:
    reference = ReferenceBackend()
    plan = backend.plan_attention(ragged_batch([(2, 2, [0])]), backend.allocate_kv_cache(SPEC))
    with pytest.raises(TypeError, match="ReferenceCache"):
        backend.attention(torch.zeros(2, 512), reference.allocate_kv_cache(SPEC), 0, plan, GEOMETRY.spec)


def test_batches_of_another_type(backend: CpuBackend) -> None:
    cache = backend.allocate_kv_cache(SPEC)
    batch = ragged_batch([(2, 2, [0])])
    with pytest.raises(ValueError, match="positions must be contiguous int32"):
        backend.plan_attention(replace(batch, positions=batch.positions.long()), cache)


def test_sampling_tensors_of_another_type_or_length(backend: CpuBackend) -> None:
    batch = sampling_batch([RowParameters(), RowParameters()], 10)
    logits = torch.zeros(2, 12)
    with pytest.raises(ValueError, match="seeds must be 2"):
        backend.sample(logits, replace(batch, seeds=batch.seeds.int()))
    with pytest.raises(ValueError, match="history_starts must be 3"):
        backend.sample(logits, replace(batch, history_starts=batch.history_starts[:2]))
    with pytest.raises(ValueError, match="vocabulary's 10"):
        backend.sample(logits[:, :9], batch)
    with pytest.raises(ValueError, match="num_top 300"):
        backend.logprobs(torch.zeros(2, 1000), torch.tensor([0, 1]), 300, 1000)
    with pytest.raises(ValueError, match=r"0\.\.9"):
        backend.logprobs(logits, torch.tensor([0, 10]), 0, 10)


def test_ids_outside_the_vocabulary_touch_nothing(backend: CpuBackend) -> None:
    row = RowParameters(prompt=(11, 2_000_000), output=(-5,), repetition=1.5, bias={10: 50.0}, forbidden=(999,))
    batch = sampling_batch([row], 10)
    assert backend.sample(torch.arange(12.0)[None], batch).token_ids.tolist() == [9]
