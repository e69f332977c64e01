"""Runs sequences through a backend's attention in any schedule of steps, and says in fp64 what must come out.

The oracle knows sequences alone: no blocks, no batches, no partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.api import AttentionSpec, Backend, KVCache, KVCacheSpec, QKNorm, RaggedBatch, RopeTable

# A step names which sequences run how many of their next tokens, in the order of the batch's rows.
Step = Sequence[tuple[int, int]]
# Opens the backend under test with a number of threads.
OpenBackend = Callable[[int], Backend]

LAYER = 1
MAX_POSITIONS = 1024


@dataclass(frozen=True)
class Geometry:
    """Shapes and options of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float | None = None
    qk_norm: bool = False
    rotary_dim: int | None = None
    # Of an fp8 cache: what keys and values are divided by when stored.
    scales: tuple[float, float] | None = None

    @property
    def width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.num_heads, self.head_dim**-0.5, self.window, self.soft_cap)

    def rope(self) -> RopeTable:
        half = (self.rotary_dim or self.head_dim) // 2
        angles = torch.outer(torch.arange(MAX_POSITIONS), 10000.0 ** -(torch.arange(half) / half))
        return RopeTable(angles.cos().float(), angles.sin().float())

    def norms(self) -> QKNorm | None:
        if not self.qk_norm:
            return None
        generator = torch.Generator().manual_seed(5)
        q_weight, k_weight = (torch.rand(2, self.head_dim, generator=generator) + 0.5).to(self.dtype)
        return QKNorm(q_weight, k_weight, 1e-5)

    def sequences(self, lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
        """Random qkv rows of sequences of those lengths."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(length, self.width, generator=generator).to(self.dtype) for length in lengths]

    def allocate(self, backend: Backend, num_blocks: int) -> KVCache:
        scales = None if self.scales is None else (self.scales,) * (LAYER + 1)
        spec = KVCacheSpec(
            LAYER + 1, num_blocks, self.block_size, self.num_kv_heads, self.head_dim, self.cache_dtype, scales
        )
        return backend.allocate_kv_cache(spec)


def int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ragged_batch(rows: Sequence[tuple[int, int, Sequence[int]]]) -> RaggedBatch:
    """From (tokens of this step, context length after it, block table) per row."""
    counts = [count for count, _, _ in rows]
    tables = max(len(table) for _, _, table in rows)
    return RaggedBatch(
        query_starts=int32([0, *torch.tensor(counts).cumsum(0).tolist()]),
        context_lens=int32([context for _, context, _ in rows]),
        block_tables=int32([[*table, *[0] * (tables - len(table))] for _, _, table in rows]),
        positions=int32([place for count, context, _ in rows for place in range(context - count, context)]),
        num_rows=len(rows),
        num_tokens=sum(counts),
        max_query_len=max(counts),
        max_context_len=max(context for _, context, _ in rows),
    )


def chunked(lengths: Sequence[int], size: int) -> Iterator[Step]:
    """Steps that run `size` tokens of every unfinished sequence."""
    for done in range(0, max(lengths), size):
        yield [(i, min(size, length - done)) for i, length in enumerate(lengths) if done < length]


def run_steps(
    backend: Backend,
    geometry: Geometry,
    sequences: Sequence[Tensor],
    steps: Sequence[Step],
    poison: float | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Each sequence's attention outputs and rotated queries over all its steps.

    The sequences' blocks are scattered over the cache; `poison` is what the cache holds before.
    """
    size = geometry.block_size
    counts = [-(-len(sequence) // size) for sequence in sequences]
    order = iter(torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(9)).tolist())
    tables = [[next(order) for _ in range(count)] for count in counts]
    cache = geometry.allocate(backend, sum(counts) + 3)
    if poison is not None:
        blocks = backend.export_blocks(cache, LAYER, range(sum(counts) + 3))
        backend.import_blocks(cache, LAYER, range(sum(counts) + 3), torch.full_like(blocks, poison))
    rope, norms, done = geometry.rope(), geometry.norms(), [0] * len(sequences)
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    queries: list[list[Tensor]] = [[] for _ in sequences]
    for step in steps:
        pieces = [sequences[i][done[i] : done[i] + count] for i, count in step]
        for i, count in step:
            done[i] += count
        plan = backend.plan_attention(ragged_batch([(count, done[i], tables[i]) for i, count in step]), cache)
        qkv = torch.cat(pieces)
        backend.rope_write_kv(qkv, cache, LAYER, plan, rope, norms)
        attended = backend.attention(qkv, cache, LAYER, plan, geometry.spec)
        lengths = [count for _, count in step]
        query = qkv[:, : geometry.num_heads * geometry.head_dim]
        for (i, _), output, rotated in zip(
            step, torch.split(attended, lengths), torch.split(query, lengths), strict=True
        ):
            outputs[i].append(output)
            queries[i].append(rotated)
    return [torch.cat(output) for output in outputs], [torch.cat(query) for query in queries]


def oracle(geometry: Geometry, sequence: Tensor) -> Tensor:
    """Attention output of a whole sequence in fp64, its inputs rounded where the API says so."""
    length = len(sequence)
    heads = sequence.double().view(length, -1, geometry.head_dim)
    kv = geometry.num_kv_heads
    query, key, value = heads[:, : -2 * kv], heads[:, -2 * kv : -kv], heads[:, -kv:]
    norms = geometry.norms()
    if norms is not None:
        query = _rms(query, norms.q_weight, norms.eps).to(geometry.dtype).double()
        key = _rms(key, norms.k_weight, norms.eps).to(geometry.dtype).double()
    query = _rotated(query, geometry).to(geometry.dtype).double()
    key_scale, value_scale = geometry.scales or (1.0, 1.0)
    key = _stored(_rotated(key, geometry), geometry.cache_dtype, key_scale)
    value = _stored(value, geometry.cache_dtype, value_scale)
    group = geometry.num_heads // kv
    key, value = (x.repeat_interleave(group, dim=1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * geometry.spec.scale
    if geometry.soft_cap is not None:
        scores = geometry.soft_cap * torch.tanh(scores / geometry.soft_cap)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (geometry.window or length))
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(length, -1)


def _stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """What a cache of that type gives back of x; fp8 saturates."""
    largest = torch.finfo(dtype).max
    return (x / scale).float().clamp(-largest, largest).to(dtype).double() * scale


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def _rotated(x: Tensor, geometry: Geometry) -> Tensor:
    rope = geometry.rope()
    half = rope.cos.shape[1]
    cos, sin = rope.cos[: len(x), None].double(), rope.sin[: len(x), None].double()
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), -1)
