"""The C++ backend's attention plan: the batch, checked, and where each of its tokens is stored.

Knows lengths and block tables; knows no keys or values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.api import KVCacheSpec, RaggedBatch
from kernels.contracts import check_batch, check_ends
from kernels.cpu.extension import native


@dataclass(frozen=True)
class CpuPlan:
    """A batch whose every index the kernels may follow without looking."""

    batch: RaggedBatch
    # The shape of cache it was checked against: (num_blocks, block_size).
    blocks: tuple[int, int]
    # [num_tokens] int64: block * block_size + offset.
    slots: Tensor
    slots_address: int
    positions_address: int
    # Addresses of query_starts, context_lens and block_tables, then num_rows, max_blocks and num_tokens.
    row_arguments: tuple[int, int, int, int, int, int]
    max_position: int
    # Of those that the tokens are stored in.
    max_block: int


def plan_attention(batch: RaggedBatch, spec: KVCacheSpec) -> CpuPlan:
    """Validates a batch; raises ValueError naming the first offending row or tensor."""
    check_batch(batch)
    check_ends(batch)
    slots = torch.empty(batch.num_tokens, dtype=torch.int64)
    max_blocks = batch.block_tables.shape[1]
    starts, contexts, tables, positions = (
        x.data_ptr() for x in (batch.query_starts, batch.context_lens, batch.block_tables, batch.positions)
    )
    found = native().plan_slots(
        starts,
        contexts,
        tables,
        positions,
        slots.data_ptr(),
        batch.num_rows,
        max_blocks,
        spec.block_size,
        spec.num_blocks,
    )
    if not isinstance(found, int):
        raise ValueError(_describe(found, max_blocks * spec.block_size, spec.num_blocks))
    rows = (starts, contexts, tables, batch.num_rows, max_blocks, batch.num_tokens)
    blocks = (spec.num_blocks, spec.block_size)
    highest = int(batch.context_lens.max()) - 1
    return CpuPlan(batch, blocks, slots, slots.data_ptr(), positions, rows, highest, found // spec.block_size)


def _describe(fault: tuple[int, int, int, int], capacity: int, num_blocks: int) -> str:
    kind, row, first, second = fault
    return (
        f"row {row} "
        + (
            "has no tokens: query_starts must ascend strictly",
            f"has more tokens than its context length (tokens {first}, context length {second})",
            f"has a context over the {capacity} tokens of its block table (tokens {first}, context length {second})",
            f"names a block outside 0..{num_blocks - 1} (entry {first} of its block table is {second})",
            f"has a token at another position than its context length says (token {first} should be at {second})",
        )[kind]
    )
