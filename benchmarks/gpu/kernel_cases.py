"""Each operation of the kernel API on random inputs, on the device and by the reference on the host.

Knows the API; times nothing. Sampled tokens must be equal but for near ties; everything else is compared by the norm
of the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels.api import (
    AttentionSpec,
    Backend,
    HostTier,
    KVCacheSpec,
    QKNorm,
    QuantizedLinears,
    RaggedBatch,
    RopeTable,
    SamplingBatch,
)
from kernels.quantized import QuantizedWeight, columns_of
from kernels.reference.quantized import linear as reference_linear
from kernels.reference.quantized import quantize_grouped, quantize_scaled

BLOCK_SIZE = 16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 128
# (new tokens, context) of each row: decode, chunks over a prefix, block edges.
ROWS = ((1, 1), (1, 16), (1, 300), (17, 17), (40, 300), (3, 515), (1, 1029))


@dataclass(frozen=True)
class Case:
    """`run` gives the results of one operation; both backends get equal inputs. `tolerance` is relative."""

    name: str
    run: Callable[[Backend, torch.device], list[Tensor]]
    tolerance: float = 1e-2


@dataclass(frozen=True)
class Verdict:
    """`error` is the largest relative error of the results."""

    name: str
    error: float
    tolerance: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance  # false for NaN


def compare(case: Case, backend: Backend, place: torch.device, reference: Backend) -> Verdict:
    """Runs the case twice."""
    found = case.run(backend, place)
    expected = case.run(reference, torch.device("cpu"))
    errors = [_error(own.cpu().float(), other.float()) for own, other in zip(found, expected, strict=True)]
    return Verdict(case.name, max(errors), case.tolerance)


def cases(has_fp8: bool) -> Iterator[Case]:
    """All of them; without fp8 caches where the device has none."""
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    for dtype in (bf16, torch.float16):
        yield Case(f"attention {dtype}", _attention(dtype, dtype))
        yield Case(f"dense {dtype}", _dense(dtype))
    yield Case("attention with a window", _attention(bf16, bf16, window=100))
    yield Case("attention with a soft cap", _attention(bf16, bf16, soft_cap=20.0))
    yield Case("attention with QK norm", _attention(bf16, bf16, has_norm=True))
    yield Case("attention in blocks of 32", _attention(bf16, bf16, block_size=32))
    if has_fp8:
        yield Case("attention, fp8 cache", _attention(bf16, fp8), 4e-2)
    for name, weight in _quantized_weights():
        yield Case(f"products with {name} weights", _quantized_products(weight))
    yield Case("sampling", _sampling, 0.0)
    yield Case("logprobs", _logprobs, 1e-4)
    yield Case("block copies", _copies, 0.0)


def moved(value: Any, place: torch.device) -> Any:
    """A dataclass with its tensors on another device."""
    if isinstance(value, Tensor):
        return value.to(place)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{field.name: moved(getattr(value, field.name), place) for field in fields(value)})


def ragged(rows: tuple[tuple[int, int], ...], block_size: int, generator: torch.Generator) -> tuple[RaggedBatch, int]:
    """A batch of those rows over blocks in random order, and how many blocks there are."""
    counts = torch.tensor([count for count, _ in rows], dtype=torch.int32)
    contexts = torch.tensor([context for _, context in rows], dtype=torch.int32)
    blocks = [-(-context // block_size) for _, context in rows]
    order = torch.randperm(sum(blocks), generator=generator).int()
    tables = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
    for row, part in enumerate(torch.split(order, blocks)):
        tables[row, : len(part)] = part
    positions = torch.cat([torch.arange(context - count, context) for count, context in rows]).int()
    starts = torch.cat([torch.zeros(1, dtype=torch.int32), counts.cumsum(0).int()])
    batch = RaggedBatch(
        starts, contexts, tables, positions, len(rows), int(counts.sum()), int(counts.max()), int(contexts.max())
    )
    return batch, sum(blocks)


def _attention(
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    window: int | None = None,
    soft_cap: float | None = None,
    has_norm: bool = False,
    block_size: int = BLOCK_SIZE,
) -> Callable[[Backend, torch.device], list[Tensor]]:
    def run(backend: Backend, place: torch.device) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        batch, num_blocks = ragged(ROWS, block_size, generator)
        width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
        qkv = torch.randn(batch.num_tokens, width, generator=generator).to(dtype).to(place)
        old = torch.randn(2, num_blocks, NUM_KV_HEADS, block_size, HEAD_DIM, generator=generator)
        angles = torch.arange(batch.max_context_len)[:, None] * 0.3 ** torch.linspace(0, 9, HEAD_DIM // 2)
        rope = moved(RopeTable(angles.cos(), angles.sin()), place)
        weights = (1 + 0.1 * torch.randn(2, HEAD_DIM, generator=generator)).to(dtype).to(place)
        norm = QKNorm(weights[0], weights[1], 1e-6) if has_norm else None
        cache = backend.allocate_kv_cache(KVCacheSpec(1, num_blocks, block_size, NUM_KV_HEADS, HEAD_DIM, cache_dtype))
        backend.import_blocks(cache, 0, range(num_blocks), old.to(cache_dtype).to(place))
        plan = backend.plan_attention(moved(batch, place), cache)
        backend.rope_write_kv(qkv, cache, 0, plan, rope, norm)
        spec = AttentionSpec(NUM_HEADS, HEAD_DIM**-0.5, window, soft_cap)
        attended = backend.attention(qkv, cache, 0, plan, spec)
        return [qkv, attended, backend.export_blocks(cache, 0, range(num_blocks)).float()]

    return run


def _dense(dtype: torch.dtype) -> Callable[[Backend, torch.device], list[Tensor]]:
    def run(backend: Backend, place: torch.device) -> list[Tensor]:
        generator = torch.Generator().manual_seed(2)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(dtype).to(place)

        x, residual, norm = random(37, 1024), random(37, 1024), random(1024)
        packed = backend.pack_linear(random(512, 1024) / 32, random(512))
        return [
            backend.linear(x, packed),
            backend.rms_norm(x, norm, 1e-6),
            backend.add_rms_norm(x, residual, norm, 1e-6),
            residual,
            backend.silu_mul(x),
            backend.gelu_mul(x),
            backend.soft_cap(x, 5.0),
        ]

    return run


def _quantized_weights() -> Iterator[tuple[str, QuantizedWeight]]:
    weight = torch.randn(384, 1024, generator=torch.Generator().manual_seed(6)) / 32
    yield "fp8", quantize_scaled(weight, (1, 1024))
    yield "fp8 block", quantize_scaled(weight, (128, 128))
    yield "int4", quantize_grouped(weight, 128)
    # In another order of inputs, and with groups that are no whole tiles.
    shuffled = torch.randperm(1024, generator=torch.Generator().manual_seed(7)) // 64
    yield "int4 desc_act", columns_of(replace(quantize_grouped(weight, 64), groups=shuffled), range(1000))


def _quantized_products(weight: QuantizedWeight) -> Callable[[Backend, torch.device], list[Tensor]]:
    def run(backend: Backend, place: torch.device) -> list[Tensor]:
        generator = torch.Generator().manual_seed(8)
        x, bias = torch.randn(130, weight.shape[1], generator=generator), torch.randn(384, generator=generator)
        rows = [x[:count].bfloat16().to(place) for count in (1, 30, 130)]
        own_bias = bias.bfloat16().to(place)
        if not isinstance(backend, QuantizedLinears):
            return [reference_linear(each, weight, own_bias) for each in rows]
        packed = backend.pack_quantized(weight, own_bias, torch.bfloat16)
        return [backend.linear(each, packed) for each in rows]

    return run


def _sampling(backend: Backend, place: torch.device) -> list[Tensor]:
    """Logits are multiples of 1/64: no two differ by a rounding, and equal ones are decided by their ids."""
    generator = torch.Generator().manual_seed(3)
    num_rows, vocab = 12, 5000
    logits = torch.randint(-512, 512, (num_rows, vocab + 24), generator=generator) / 64
    numbers = torch.arange(num_rows)
    none, no_ids = torch.zeros(num_rows + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    batch = SamplingBatch(
        temperatures=(numbers % 3) * 0.5,
        top_ks=((numbers % 4) * 20).int(),
        top_ps=torch.where(numbers % 5 == 1, 0.8, 1.0),
        min_ps=torch.where(numbers % 5 == 2, 0.05, 0.0),
        seeds=numbers * 1234567,
        positions=numbers + 9,
        repetition_penalties=torch.ones(num_rows),
        frequency_penalties=torch.zeros(num_rows),
        presence_penalties=torch.where(numbers % 2 == 0, 0.5, 0.0),
        history_starts=torch.arange(0, 3 * num_rows + 1, 3).int(),
        history_ids=torch.randint(0, vocab, (3 * num_rows,), generator=generator).int(),
        history_prompt_lens=torch.ones(num_rows, dtype=torch.int32),
        bias_starts=none,
        bias_ids=no_ids,
        bias_values=torch.zeros(0),
        forbidden_starts=torch.arange(0, 2 * num_rows + 1, 2).int(),
        forbidden_ids=torch.randint(0, vocab, (2 * num_rows,), generator=generator).int(),
        logprob_rows=torch.zeros(0, dtype=torch.int32),
        num_top=0,
        vocab_size=vocab,
    )
    samples = backend.sample(logits.to(place), moved(batch, place))
    return [samples.token_ids, samples.finite]


def _logprobs(backend: Backend, place: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(9, 5024, generator=generator)
    ids = torch.randint(0, 5000, (9,), generator=generator)
    found = backend.logprobs(logits.to(place), ids.to(place), 5, 5000)
    return [found.token_logprobs, found.top_ids, found.top_logprobs]


def _copies(backend: Backend, place: torch.device) -> list[Tensor]:
    """To the host tier and back to other blocks."""
    generator = torch.Generator().manual_seed(5)
    spec = KVCacheSpec(2, 8, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, torch.bfloat16)
    cache = backend.allocate_kv_cache(spec)
    host = backend.allocate_host_kv_cache(spec) if isinstance(backend, HostTier) else backend.allocate_kv_cache(spec)
    for layer in range(2):
        blocks = torch.randn(2, 8, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, generator=generator).bfloat16()
        backend.import_blocks(cache, layer, range(8), blocks.to(place))
    backend.copy_blocks(cache, [1, 5], host, [7, 0])
    backend.copy_blocks(host, [0, 7], cache, [2, 3])
    return [backend.export_blocks(cache, layer, range(8)) for layer in range(2)]


def _error(found: Tensor, expected: Tensor) -> float:
    if torch.equal(found, expected):
        return 0.0
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))
