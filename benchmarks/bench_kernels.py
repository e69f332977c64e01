"""Times the kernels of every backend on the shapes of a small model's step and says what rates they reach.

Shapes are SmolLM2-135M's: 9 query and 3 KV heads of 64, hidden 576, MLP 1,536, vocabulary 49,152, bf16. Each figure is
the best of several timed runs: the machine's noise only adds. `--json FILE` writes them for comparison over time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import torch

from benchmarks.second_copies import make_all_copies
from kernels.api import (
    AttentionPlan,
    AttentionSpec,
    Backend,
    KVCache,
    KVCacheSpec,
    PackedLinear,
    RaggedBatch,
    RopeTable,
    SamplingBatch,
)
from kernels.select import open_backend

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCABULARY, BLOCK = 9, 3, 64, 576, 1536, 49152, 16
# As many as the model has: the cache of one call is not in the processor's own any more when its turn comes again.
LAYERS = 30
# Matrices of a layer by name: columns and depth.
MATRICES = {
    "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
    "output": (HIDDEN, HEADS * HEAD_DIM),
    "gate_up": (2 * MLP, HIDDEN),
    "down": (HIDDEN, MLP),
}
# More than a processor's last cache holds, taken in turn, so that weights come from memory as in a step.
MATRIX_BYTES = 128 * 2**20
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Heads:
    """Of a model's attention, and the type of its cache."""

    num_heads: int
    num_kv_heads: int
    dim: int
    cache_dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.cache_dtype).removeprefix("torch.")
        return f"heads {self.num_heads}/{self.num_kv_heads} of {self.dim}, {dtype} cache"


ATTENTION_HEADS = [
    Heads(num, num_kv, dim, dtype)
    for num, num_kv, dim in ((HEADS, KV_HEADS, HEAD_DIM), (12, 2, 128))
    for dtype in (torch.float32, torch.bfloat16)
]


@dataclass(frozen=True)
class Case:
    """One call to time, and what it must move and compute."""

    name: str
    call: Callable[[], object]
    num_bytes: float
    num_flops: float


@dataclass(frozen=True)
class Figure:
    backend: str
    variant: str
    case: str
    microseconds: float
    gigabytes_per_second: float
    gigaflops_per_second: float


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ragged(num_rows: int, num_queries: int, context: int) -> RaggedBatch:
    blocks_per_row = -(-context // BLOCK)
    order = torch.randperm(num_rows * blocks_per_row, generator=torch.Generator().manual_seed(0))
    return RaggedBatch(
        query_starts=int32(range(0, num_rows * num_queries + 1, num_queries)),
        context_lens=int32([context] * num_rows),
        block_tables=order.to(torch.int32).view(num_rows, blocks_per_row),
        positions=int32(list(range(context - num_queries, context)) * num_rows),
        num_rows=num_rows,
        num_tokens=num_rows * num_queries,
        max_query_len=num_queries,
        max_context_len=context,
    )


def attention_cases(backend: Backend, heads: Heads, num_rows: int, num_queries: int, context: int) -> Iterator[Case]:
    batch = ragged(num_rows, num_queries, context)
    dim, dtype, num_kv, num_blocks = heads.dim, heads.cache_dtype, heads.num_kv_heads, batch.block_tables.numel()

    @cache  # at the first call: of a case that isn't run, no memory is filled
    def filled() -> tuple[KVCache, AttentionPlan]:
        memory = backend.allocate_kv_cache(KVCacheSpec(LAYERS, num_blocks, BLOCK, num_kv, dim, dtype))
        blocks = torch.randn(2, num_blocks, num_kv, BLOCK, dim).to(dtype)
        for layer in range(LAYERS):
            backend.import_blocks(memory, layer, range(num_blocks), blocks)
        return memory, backend.plan_attention(batch, memory)

    def attention(spec: AttentionSpec) -> object:
        memory, plan = filled()
        return backend.attention(qkv, memory, next(turn) % LAYERS, plan, spec)

    def rope_write_kv(rope: RopeTable) -> None:
        memory, plan = filled()
        backend.rope_write_kv(qkv, memory, next(turn) % LAYERS, plan, rope, None)

    qkv = torch.randn(batch.num_tokens, (heads.num_heads + 2 * num_kv) * dim).to(dtype)
    angles = torch.outer(torch.arange(context), 10000.0 ** -(torch.arange(dim // 2) / (dim // 2)))
    turn = iter(range(1 << 60))
    seen = num_rows * sum(range(context - num_queries + 1, context + 1))
    shape = f"{num_rows}x{num_queries} tokens of {context}, {heads}"
    yield Case(
        f"attention {shape}",
        partial(attention, AttentionSpec(heads.num_heads, dim**-0.5)),
        num_rows * context * num_kv * dim * 2 * dtype.itemsize,
        seen * heads.num_heads * dim * 4,
    )
    yield Case(
        f"rope_write_kv {shape}",
        partial(rope_write_kv, RopeTable(angles.cos(), angles.sin())),
        qkv.numel() * qkv.element_size() * 2,
        0,
    )


def dense_cases(backend: Backend, num_rows: int) -> Iterator[Case]:
    x, residual = torch.randn(2, num_rows, HIDDEN).to(DTYPE)
    weight = torch.ones(HIDDEN, dtype=DTYPE)
    gate_up = torch.randn(num_rows, 2 * MLP).to(DTYPE)
    size = x.numel() * x.element_size()
    yield Case(f"rms_norm {num_rows}x{HIDDEN}", lambda: backend.rms_norm(x, weight, 1e-5), 2 * size, 0)
    yield Case(
        f"add_rms_norm {num_rows}x{HIDDEN}", lambda: backend.add_rms_norm(x, residual, weight, 1e-5), 4 * size, 0
    )
    yield Case(f"silu_mul {num_rows}x{MLP}", lambda: backend.silu_mul(gate_up), gate_up.numel() * 3, 0)


def linear_cases(backend: Backend) -> Iterator[Case]:
    for name, (columns, depth) in MATRICES.items():
        size = columns * depth * DTYPE.itemsize
        weight = torch.randn(columns, depth).to(DTYPE)
        packed = [backend.pack_linear(weight, None) for _ in range(-(-MATRIX_BYTES // size))]
        make_all_copies(backend)
        turn = itertools.cycle(packed)
        for num_rows in (1, 2, 8, 32, 128, 512):
            x = torch.randn(num_rows, depth).to(DTYPE)
            call = partial(multiply_next, backend, x, turn)
            yield Case(f"linear {name} {num_rows}x{depth}x{columns}", call, size, 2 * num_rows * columns * depth)


def multiply_next(backend: Backend, x: torch.Tensor, turn: Iterator[PackedLinear]) -> torch.Tensor:
    return backend.linear(x, next(turn))


def sampling_batch(num_rows: int, temperature: float, top_p: float, num_top: int) -> SamplingBatch:
    def full(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype)

    starts, none = torch.zeros(num_rows + 1, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    return SamplingBatch(
        temperatures=full(temperature),
        top_ks=full(0, torch.int32),
        top_ps=full(top_p),
        min_ps=full(0),
        seeds=torch.arange(num_rows),
        positions=torch.arange(num_rows),
        repetition_penalties=full(1),
        frequency_penalties=full(0),
        presence_penalties=full(0),
        history_starts=starts,
        history_ids=none,
        history_prompt_lens=full(0, torch.int32),
        bias_starts=starts,
        bias_ids=none,
        bias_values=torch.empty(0),
        forbidden_starts=starts,
        forbidden_ids=none,
        logprob_rows=torch.arange(num_rows if num_top else 0, dtype=torch.int32),
        num_top=num_top,
        vocab_size=VOCABULARY,
    )


def sampling_cases(backend: Backend, num_rows: int) -> Iterator[Case]:
    logits = (torch.randn(num_rows, VOCABULARY) * 3).to(DTYPE)
    size = logits.numel() * logits.element_size()
    for name, batch in {
        "greedy": sampling_batch(num_rows, 0, 1, 0),
        "temperature 1": sampling_batch(num_rows, 1, 1, 0),
        "top-p 0.9": sampling_batch(num_rows, 1, 0.9, 0),
        "greedy, 5 logprobs": sampling_batch(num_rows, 0, 1, 5),
    }.items():
        yield Case(f"sample {name} {num_rows}x{VOCABULARY}", partial(backend.sample, logits, batch), size, 0)


def all_cases(backend: Backend) -> Iterator[Case]:
    for heads in ATTENTION_HEADS:
        for context in (192, 512):
            for num_rows in (1, 8, 32):
                yield from attention_cases(backend, heads, num_rows, 1, context)
        yield from attention_cases(backend, heads, 1, 1024, 1024)
    yield from linear_cases(backend)
    for num_rows in (1, 32):
        yield from dense_cases(backend, num_rows)
        yield from sampling_cases(backend, num_rows)


def best_seconds(call: Callable[[], object], budget_seconds: float) -> float:
    """The shortest run, of at least five, within a budget."""
    call()
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 5 or (spent < budget_seconds and runs < 10_000):
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        best, spent, runs = min(best, taken), spent + taken, runs + 1
    return best


def measure(backend: Backend, only: str, budget_seconds: float) -> Iterator[Figure]:
    for case in all_cases(backend):
        if only not in case.name:
            continue
        seconds = best_seconds(case.call, budget_seconds)
        yield Figure(
            backend.info.name,
            backend.info.variant,
            case.name,
            round(seconds * 1e6, 2),
            round(case.num_bytes / seconds / 1e9, 2),
            round(case.num_flops / seconds / 1e9, 2),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="cpu,reference")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only", default="", help="run only the cases whose name holds this")
    parser.add_argument("--seconds", type=float, default=0.2, help="time spent on one case")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    figures: list[Figure] = []
    for name in options.backends.split(","):
        for figure in measure(open_backend(name, options.threads), options.only, options.seconds):
            figures.append(figure)
            print(
                f"{figure.backend:9} {figure.case:40} {figure.microseconds:12.2f} us"
                f" {figure.gigabytes_per_second:8.2f} GB/s {figure.gigaflops_per_second:8.2f} GFLOP/s"
            )
            sys.stdout.flush()
    if options.json:
        about = {"machine": platform.processor() or platform.machine(), "threads": options.threads}
        about |= {"torch": torch.__version__}
        options.json.write_text(json.dumps({**about, "figures": [asdict(figure) for figure in figures]}, indent=2))


if __name__ == "__main__":
    main()
