"""Times launch configurations of the attention kernels on this GPU and writes the best into kernels/triton/configs.py.

    python -m tools.sweep_kernels [--head-dims 64,128] [--print]
    python -m tools.sweep_kernels --dry            # compiles every candidate for sm_90 and says which spill; no GPU

Decode is timed inside a CUDA graph over several caches in turn, so that none is found in the second-level cache. The
score of a candidate is the mean of its times over the best candidate's on the same shape. Candidates that spill or
do not fit are left out. Knows the tables' text; decides nothing while serving.
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.runtime.errors import OutOfResources

from kernels.api import AttentionSpec, KVCacheSpec, RaggedBatch
from kernels.triton import TritonBackend, configs
from kernels.triton.backend import device_shape
from kernels.triton.configs import DecodeConfig, PrefillConfig
from kernels.triton.layer import DeviceShape
from tools.dry_compile import Report, dry_run
from tools.graph_time import graph_time_ms

CONFIGS = Path(configs.__file__)
NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 32, 8, 16
DRY_CAPABILITY = 90
# (rows, context of each) of decode; (new tokens, context) of one row of prefill.
DECODE_SHAPES = ((1, 4096), (16, 4096), (64, 1024), (64, 4096))
PREFILL_SHAPES = ((4096, 4096), (2048, 16384))
# Bytes of keys and values between two uses of the same cache: several times any second-level cache.
COLD_BYTES = 250e6
CACHE_DTYPES = {2: torch.bfloat16, 1: torch.float8_e4m3fn}

DECODE_CANDIDATES = [
    DecodeConfig(16, tile, warps, stages, programs)
    for tile, warps, stages, programs in itertools.product((32, 64, 128), (2, 4), (3, 4), (2, 3, 4, 6))
]
PREFILL_CANDIDATES = [
    PrefillConfig(block_m, tile, warps, stages)
    for (block_m, warps), tile, stages in itertools.product(((64, 4), (128, 8)), (32, 64, 128), (2, 3))
]

Key = tuple[int, int, int]


def written(text: str, table: str, key: Key, config: DecodeConfig | PrefillConfig) -> str:
    """The text of configs.py with one entry of a table replaced or added, in the order of keys."""
    begin = re.search(rf"^{table}: dict\[.*\] = \{{\n", text, re.MULTILINE)
    if begin is None:
        raise ValueError(f"configs.py has no table {table}")
    end = text.index("}\n", begin.end())
    entries = dict(re.findall(r"    (\(\d+, \d+, \d+\)): (.*),\n", text[begin.end() : end]))
    values = ", ".join(str(value) for value in vars(config).values())
    entries[str(key)] = f"{type(config).__name__}({values})"
    lines = sorted(entries.items(), key=lambda entry: tuple(map(int, re.findall(r"\d+", entry[0]))))
    return text[: begin.end()] + "".join(f"    {name}: {value},\n" for name, value in lines) + text[end:]


class Case:
    """One shape of attention on this device: what a call runs, whatever the configuration."""

    def __init__(self, backend: TritonBackend, spec: KVCacheSpec, count: int, context: int, rows: int) -> None:
        self._spec = AttentionSpec(NUM_HEADS, spec.head_dim**-0.5)
        blocks = -(-context // spec.block_size)
        self.cache = backend.allocate_kv_cache(replace(spec, num_blocks=rows * blocks))
        device = self.cache.data.device  # type: ignore[attr-defined]
        tokens = rows * count
        self._qkv = torch.randn(tokens, (NUM_HEADS + 2 * NUM_KV_HEADS) * spec.head_dim, device=device).bfloat16()
        positions = torch.arange(context - count, context, dtype=torch.int32).repeat(rows)
        self._batch = RaggedBatch(
            query_starts=torch.arange(0, tokens + 1, count, dtype=torch.int32, device=device),
            context_lens=torch.full((rows,), context, dtype=torch.int32, device=device),
            block_tables=torch.randperm(rows * blocks).int().view(rows, blocks).to(device),
            positions=positions.to(device),
            num_rows=rows,
            num_tokens=tokens,
            max_query_len=count,
            max_context_len=context,
        )

    def run(self, backend: TritonBackend) -> None:
        plan = backend.plan_attention(self._batch, self.cache)
        backend.attention(self._qkv, self.cache, 0, plan, self._spec)


def cases(backend: TritonBackend, spec: KVCacheSpec, prefill: bool) -> list[list[Case]]:
    """Per shape, as many caches as it takes to find none of them in the second-level cache."""
    if prefill:
        return [[Case(backend, spec, count, context, 1)] for count, context in PREFILL_SHAPES]
    result = []
    for rows, context in DECODE_SHAPES:
        num_bytes = rows * context * spec.bytes_per_block / spec.block_size
        copies = min(24, math.ceil(COLD_BYTES / num_bytes))
        result.append([Case(backend, spec, 1, context, rows) for _ in range(copies)])
    return result


def best(
    key: Key, table: dict[Key, Any], candidates: Iterable[Any], groups: list[list[Case]], shape: DeviceShape
) -> DecodeConfig | PrefillConfig:
    """The candidate with the smallest mean of times, each over the best of its shape."""
    times: dict[Any, list[float]] = {}
    device = torch.device("cuda")
    for candidate in candidates:
        table[key] = candidate
        backend = TritonBackend(device, shape=shape)
        try:
            times[candidate] = [graph_time_ms([partial(case.run, backend) for case in group]) for group in groups]
        except OutOfResources:
            continue
        print(key, candidate, " ".join(f"{1000 * x:.1f} us" for x in times[candidate]), flush=True)
    floors = [min(column) for column in zip(*times.values(), strict=True)]

    def score(candidate: Any) -> float:
        return sum(x / floor for x, floor in zip(times[candidate], floors, strict=True))

    return min(times, key=score)


def sweep(head_dims: Sequence[int], print_only: bool) -> None:
    shape = device_shape(torch.device("cuda"))
    for head_dim, (cache_bytes, dtype) in itertools.product(head_dims, CACHE_DTYPES.items()):
        spec = KVCacheSpec(1, 1, BLOCK_SIZE, NUM_KV_HEADS, head_dim, dtype)
        key = (shape.arch, head_dim, cache_bytes)
        for name, candidates in (("DECODE", DECODE_CANDIDATES), ("PREFILL", PREFILL_CANDIDATES)):
            table = getattr(configs, name)
            groups = cases(TritonBackend(torch.device("cuda"), shape=shape), spec, name == "PREFILL")
            chosen = best(key, table, candidates, groups, shape)
            table[key] = chosen
            print(f"{name}[{key}] = {chosen}", flush=True)
            if not print_only:
                CONFIGS.write_text(written(CONFIGS.read_text(), name, key, chosen))


def dry(head_dims: Sequence[int]) -> None:
    """Compiles every candidate's kernel and prints what it takes."""
    shape = DeviceShape(DRY_CAPABILITY, 132)
    for head_dim, (cache_bytes, dtype) in itertools.product(head_dims, CACHE_DTYPES.items()):
        spec = KVCacheSpec(1, 1, BLOCK_SIZE, NUM_KV_HEADS, head_dim, dtype)
        key = (shape.arch, head_dim, cache_bytes)
        for table, candidates in ((configs.DECODE, DECODE_CANDIDATES), (configs.PREFILL, PREFILL_CANDIDATES)):
            count = 1 if table is configs.DECODE else 100
            for candidate in candidates:
                table[key] = candidate  # type: ignore[index,assignment]
                backend = TritonBackend(torch.device("cpu"), shape=shape)
                try:
                    with dry_run(DRY_CAPABILITY) as compiled:
                        Case(backend, spec, count, 300, 1).run(backend)
                except OutOfResources as error:
                    print(key, candidate, error, flush=True)
                    continue
                for report in map(Report, compiled):
                    if report.name in ("_decode_partitions", "_prefill"):
                        print(key, candidate, f"{report.registers} registers, {report.spills} spills", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--dry", action="store_true", help="compile every candidate, time none")
    parser.add_argument("--print", action="store_true", help="leave configs.py as it is")
    options = parser.parse_args()
    head_dims = [int(text) for text in options.head_dims.split(",")]
    if options.dry:
        dry(head_dims)
    elif not torch.cuda.is_available():
        print("no CUDA device is visible; --dry compiles without one", file=sys.stderr)
        return 1
    else:
        sweep(head_dims, options.print)
    return 0


if __name__ == "__main__":
    sys.exit(main())
