"""Compiles the Triton kernels for GPUs that are not there and writes what they take into docs/kernels.md.

With --check, fails when the committed table differs. Registers and instruction counts depend on the compiler, so the
table names its Triton version, and a check under another version says so and compares nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import triton

from kernels.api import AttentionSpec, KVCacheSpec, RaggedBatch, RopeTable
from kernels.triton import TritonBackend
from kernels.triton.configs import architecture, attention_configs
from kernels.triton.layer import DeviceShape
from tools.dry_compile import Report, dry_run

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "kernels.md"
BEGIN, END = "<!-- compiled kernels: begin -->\n", "<!-- compiled kernels: end -->\n"
# An H200: measured copy bandwidth over 132 multiprocessors at their clock under load, bytes per cycle.
BYTES_PER_CYCLE = 4300 / 132 / 1.83
NUM_KV_HEADS = 8


@dataclass(frozen=True)
class Shape:
    """One attention layer to compile for: 8 KV heads, decode rows or one row of a prompt."""

    capability: int
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    invariant: bool = False
    prefill: bool = False
    window: int | None = None
    soft_cap: float | None = None
    # Query heads of a KV head.
    group: int = 4

    @property
    def num_heads(self) -> int:
        return NUM_KV_HEADS * self.group

    @property
    def loop_bytes(self) -> int:
        """Bytes of keys and values that a turn of the attention loop fetches."""
        return 2 * self.tile * self.head_dim * self.cache_dtype.itemsize

    @property
    def tile(self) -> int:
        cache_bytes = self.cache_dtype.itemsize
        sizes = 2 if cache_bytes == 1 else self.dtype.itemsize, cache_bytes
        arch = architecture(self.capability)
        return attention_configs(arch, self.head_dim, *sizes, self.invariant)[self.prefill].tile


SHAPES = (
    Shape(90),
    Shape(90, block_size=64),
    Shape(90, head_dim=64),
    Shape(90, head_dim=80),
    Shape(90, head_dim=256),
    Shape(90, cache_dtype=torch.float8_e4m3fn),
    Shape(90, head_dim=64, cache_dtype=torch.float8_e4m3fn),
    Shape(90, head_dim=80, cache_dtype=torch.float8_e4m3fn),
    Shape(90, invariant=True),
    Shape(90, head_dim=64, invariant=True, window=4096, soft_cap=50.0),
    Shape(90, head_dim=64, cache_dtype=torch.float8_e4m3fn, invariant=True, window=4096, soft_cap=50.0),
    Shape(90, head_dim=256, cache_dtype=torch.float8_e4m3fn, invariant=True, window=4096, soft_cap=50.0),
    Shape(90, prefill=True),
    Shape(90, prefill=True, head_dim=64),
    Shape(90, prefill=True, head_dim=256),
    Shape(90, prefill=True, cache_dtype=torch.float8_e4m3fn),
    Shape(90, prefill=True, head_dim=256, cache_dtype=torch.float8_e4m3fn, window=4096, soft_cap=50.0),
    Shape(90, prefill=True, invariant=True),
    Shape(80),
    Shape(80, invariant=True),
    Shape(80, prefill=True),
)


@functools.cache
def attention_kernels(shape: Shape) -> dict[str, Report]:
    """The kernels of a step's attention that no shape before needed, compiled by a step on CPU tensors."""
    device = DeviceShape(shape.capability, 132)
    backend = TritonBackend(torch.device("cpu"), shape.invariant, shape=device)
    cache = backend.allocate_kv_cache(
        KVCacheSpec(1, 32, shape.block_size, NUM_KV_HEADS, shape.head_dim, shape.cache_dtype)
    )
    batch = ragged_batch((100,) if shape.prefill else (1, 1), 300, shape.block_size)
    qkv = torch.zeros(batch.num_tokens, (shape.num_heads + 2 * NUM_KV_HEADS) * shape.head_dim, dtype=shape.dtype)
    table = torch.zeros(512, shape.head_dim // 2)
    spec = AttentionSpec(shape.num_heads, shape.head_dim**-0.5, shape.window, shape.soft_cap)
    with dry_run(shape.capability) as compiled:
        plan = backend.plan_attention(batch, cache)
        backend.rope_write_kv(qkv, cache, 0, plan, RopeTable(table, table), None)
        backend.attention(qkv, cache, 0, plan, spec)
    return {report.name: report for report in map(Report, compiled)}


def ragged_batch(counts: Sequence[int], context: int, block_size: int) -> RaggedBatch:
    """Rows of those many new tokens, each in that context. Positions are not what they should be: nothing runs."""
    blocks = -(-context // block_size)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return RaggedBatch(
        query_starts=starts,
        context_lens=torch.full((len(counts),), context, dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32).expand(len(counts), -1).contiguous(),
        positions=torch.zeros(sum(counts), dtype=torch.int32),
        num_rows=len(counts),
        num_tokens=sum(counts),
        max_query_len=max(counts),
        max_context_len=context,
    )


def attention_report(shape: Shape) -> Report:
    """The attention kernel itself."""
    return attention_kernels(shape)["_prefill" if shape.prefill else "_decode_partitions"]


def lines() -> Iterator[str]:
    """The table in Markdown, and what it was made with."""
    yield f"Compiled with Triton {triton.__version__}."
    yield ""
    yield "| kernel | registers | spills | shared memory | per SM | buffers | matrix instruction | issue / fetch |"
    yield "|---|---|---|---|---|---|---|---|"
    for shape in SHAPES:
        report = attention_report(shape)
        instructions = "wgmma" if report.count("HGMMA") else "mma"
        buffers = min(depth for depth, _, _ in report.matrix_buffers())
        share = "" if shape.prefill else f"{report.issue_share(shape.loop_bytes, BYTES_PER_CYCLE):.2f}"
        yield (
            f"| {describe(shape)} | {report.registers} | {report.spills} | {report.shared_bytes // 1024} KiB "
            f"| {report.programs_per_multiprocessor} | {buffers} | {instructions} | {share} |"
        )


def describe(shape: Shape) -> str:
    words = ["prefill" if shape.prefill else "decode", f"sm_{shape.capability}", f"head_dim {shape.head_dim}"]
    if shape.cache_dtype != shape.dtype:
        words.append("fp8 KV")
    if shape.block_size != 16:
        words.append(f"blocks of {shape.block_size}")
    if shape.window is not None:
        words.append("window")
    if shape.soft_cap is not None:
        words.append("soft cap")
    if shape.invariant:
        words.append("invariant")
    return ", ".join(words)


def main() -> int:
    text = DOCUMENT.read_text()
    head, rest = text.split(BEGIN)
    committed, tail = rest.split(END)
    if "--check" in sys.argv and f"Triton {triton.__version__}." not in committed:
        print(f"{DOCUMENT.name} was made with another Triton than {triton.__version__}; nothing compared")
        return 0
    table = "\n".join(lines()) + "\n"
    if "--check" in sys.argv:
        if table != committed:
            print(f"{DOCUMENT.name} is stale: run python -m tools.kernel_table\n{table}")
        return int(table != committed)
    DOCUMENT.write_text(head + BEGIN + table + END + tail)
    return 0


if __name__ == "__main__":
    sys.exit(main())
