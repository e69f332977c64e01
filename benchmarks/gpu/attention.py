"""Tables of decode and prefill attention, beside torch's SDPA and FlashInfer where it can be imported.

Caches are used in turn, so that no launch finds its keys and values in the second-level cache. Knows the kernel API.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import aims
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernel_cases import moved, ragged
from kernels.api import AttentionPlan, AttentionSpec, KVCache, KVCacheSpec, RaggedBatch

_FLASHINFER_COMPILES_S = 120.0


@dataclass(frozen=True)
class Attended:
    """One set of inputs of attention."""

    qkv: Tensor
    batch: RaggedBatch
    cache: KVCache
    plan: AttentionPlan


def make(bench: Bench, rows: tuple[tuple[int, int], ...], block_size: int, cache_dtype: torch.dtype) -> Attended:
    """Rows of (new tokens, context) over random queries, and a cache of random numbers."""
    sizes, place = bench.sizes, bench.place
    batch, num_blocks = ragged(rows, block_size, torch.Generator().manual_seed(0))
    spec = KVCacheSpec(1, num_blocks, block_size, sizes.num_kv_heads, sizes.head_dim, cache_dtype)
    cache = bench.backend.allocate_kv_cache(spec)
    # By parts: fp8 numbers cannot be drawn, and a copy of a large cache may not fit.
    for first in range(0, num_blocks, 4096):
        ids = range(first, min(first + 4096, num_blocks))
        drawn = torch.randn(2, len(ids), sizes.num_kv_heads, block_size, sizes.head_dim, device=place)
        bench.backend.import_blocks(cache, 0, ids, drawn.to(cache_dtype))
    width = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
    qkv = torch.randn(batch.num_tokens, width, device=place).bfloat16()
    on_place = moved(batch, place)
    return Attended(qkv, on_place, cache, bench.backend.plan_attention(on_place, cache))


def call(bench: Bench, given: Attended) -> Callable[[], object]:
    spec = AttentionSpec(bench.sizes.num_heads, bench.sizes.head_dim**-0.5)
    return lambda: bench.backend.attention(given.qkv, given.cache, 0, given.plan, spec)


def decode_table(bench: Bench, copy_bytes_per_s: float, has_fp8: bool) -> None:
    """Microseconds and share of the copy bandwidth, by rows and context, in bf16 and, of the longer ones, fp8."""
    sizes = bench.sizes
    for num_rows, context in sizes.decode:
        for cache_dtype in (torch.bfloat16, torch.float8_e4m3fn)[: 1 + has_fp8]:
            num_bytes = 2 * num_rows * context * sizes.num_kv_heads * sizes.head_dim * cache_dtype.itemsize
            what = f"decode {num_rows} x {context} {cache_dtype}"
            if not bench.has_time(4.0, what):
                return
            if 2.2 * num_bytes > bench.free_bytes():
                bench.note("left out", f"{what}: does not fit", what=what)
                continue
            sets = [make(bench, ((1, context),) * num_rows, 16, cache_dtype) for _ in range(bench.copies(num_bytes))]
            us = bench.time_us([call(bench, given) for given in sets])
            share = num_bytes / (us / 1e6) / copy_bytes_per_s
            aim = _decode_aim(num_rows, context, num_bytes, cache_dtype)
            line = f"{what:<42} {us:9.1f} us {num_bytes / us / 1e3:7.0f} GB/s {share:6.1%}{aim}"
            values = {"rows": num_rows, "context": context, "kv_dtype": str(cache_dtype), "us": us, "share": share}
            bench.note("decode", line, **values)
            if cache_dtype == torch.bfloat16:
                _flashinfer_decode(bench, sets, context, num_bytes, copy_bytes_per_s)
            del sets


def _decode_aim(num_rows: int, context: int, num_bytes: int, cache_dtype: torch.dtype) -> str:
    if cache_dtype == torch.bfloat16:
        return aims.beside(aims.DECODE_US.get((num_rows, context)), "us")
    return aims.beside(aims.FP8_DECODE_SHARE if num_bytes >= aims.FP8_DECODE_BYTES else None, "%")


def prefill_table(bench: Bench, matmul_flops: float) -> None:
    """Microseconds and share of the matmul rate, of one row of new tokens over a context before them."""
    sizes = bench.sizes
    for count, before in sizes.prefill:
        what = f"prefill {count} over {before}"
        if not bench.has_time(4.0, what):
            return
        flops = 4 * sizes.num_heads * sizes.head_dim * (count * before + count * (count + 1) / 2)
        given = make(bench, ((count, before + count),), 16, torch.bfloat16)
        us = bench.time_us([call(bench, given)])
        rate = flops / (us / 1e6)
        aim = aims.beside(aims.PREFILL_TFLOPS.get((count, before)), "TFLOP/s")
        line = f"{what:<42} {us:9.1f} us {rate / 1e12:7.1f} TFLOP/s {rate / matmul_flops:6.1%}{aim}"
        bench.note("prefill", line, tokens=count, before=before, us=us, flops_per_s=rate)
        if before == 0:
            _sdpa_prefill(bench, count, flops)


def _sdpa_prefill(bench: Bench, count: int, flops: float) -> None:
    sizes = bench.sizes
    query, key, value = (
        torch.randn(1, heads, count, sizes.head_dim, device=bench.place).bfloat16()
        for heads in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    )
    us = bench.time_us([lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)])
    line = f"{'  torch SDPA':<42} {us:9.1f} us {flops / us / 1e6:7.1f} TFLOP/s"
    bench.note("prefill peer", line, peer="sdpa", tokens=count, us=us)


def _flashinfer_decode(
    bench: Bench, sets: list[Attended], context: int, num_bytes: float, copy_bytes_per_s: float
) -> None:
    """With tensor cores, the faster way for several query heads a KV head; nothing where it is not installed."""
    flashinfer = _flashinfer(bench)
    # Without prebuilt kernels it compiles them at its first use, which may take minutes and cannot be cut short.
    is_first = not any(figure["kind"].startswith("decode peer") for figure in bench.figures)
    if flashinfer is None or not bench.has_time(_FLASHINFER_COMPILES_S if is_first else 4.0, "FlashInfer"):
        return
    sizes = bench.sizes
    try:
        calls = [_planned(flashinfer, bench, given, context) for given in sets[:4]]
        us = bench.time_us(calls)
    except Exception as error:  # a peer's failure is a line in the table, not the end of it
        line = f"  FlashInfer failed: {type(error).__name__}: {str(error)[:100]}"
        bench.note("decode peer failed", line, peer="flashinfer", rows=len(sets[0].qkv), context=context)
        return
    share = num_bytes / (us / 1e6) / copy_bytes_per_s
    line = f"{'  FlashInfer':<42} {us:9.1f} us {num_bytes / us / 1e3:7.0f} GB/s {share:6.1%}"
    bench.note(
        "decode peer", line, peer="flashinfer", rows=len(sets[0].qkv), context=context, us=us, heads=sizes.num_heads
    )


def _planned(flashinfer: Any, bench: Bench, given: Attended, context: int) -> Callable[[], object]:
    sizes, num_rows = bench.sizes, given.batch.num_rows
    blocks = given.batch.block_tables.shape[1]
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=bench.place)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(0, num_rows * blocks + 1, blocks, dtype=torch.int32),
        given.batch.block_tables.flatten(),
        torch.full((num_rows,), (context - 1) % 16 + 1, dtype=torch.int32),
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.head_dim,
        16,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )
    query = given.qkv[:, : sizes.num_heads * sizes.head_dim].reshape(num_rows, sizes.num_heads, -1).contiguous()
    keys, values = given.cache.layers[0]  # type: ignore[attr-defined]
    return lambda: wrapper.run(query, (keys, values))


def _flashinfer(bench: Bench) -> Any:
    if bench.place.type != "cuda":
        return None
    try:
        return importlib.import_module("flashinfer")
    except ImportError:
        return None
