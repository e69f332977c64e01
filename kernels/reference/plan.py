"""What attention derives from a step's ragged batch: where tokens are stored and who reads which KV partition.

Knows lengths, block tables and windows; knows no keys or values. Per partition of KV_PARTITION positions:

    tokens   singles (rows of one token here, such as decode rows), then chunks (rows of several), row by row
    rows     the KV each needs, in the same order: one gather fetches their blocks
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.api import KV_PARTITION, KVCacheSpec, RaggedBatch
from kernels.contracts import check_batch, check_ends


@dataclass(frozen=True)
class Chunk:
    """Tokens [begin, end) of a partition's work, all of the row at place `row` among its rows."""

    row: int
    begin: int
    end: int


@dataclass(frozen=True)
class PartitionWork:
    """The tokens that see at least one position of a partition, and what they need to see it."""

    # Which of the step's tokens; None means all in order.
    tokens: Tensor | None
    num_singles: int
    chunks: tuple[Chunk, ...]
    # Blocks of all rows, KV_PARTITION / block_size each; places past a row's context name block 0.
    block_ids: Tensor
    # Places in [rows * KV_PARTITION] past their row's context: whatever the blocks still hold there counts as zero.
    stale: Tensor | None
    # [tokens, KV_PARTITION]: what a token does not see. None when each sees all.
    hidden: Tensor | None
    # No token here sees an earlier partition.
    is_first: bool


@dataclass(frozen=True)
class ReferencePlan:
    """A step's attention plan; the work of each sliding window is derived when a layer first asks."""

    batch: RaggedBatch
    # The shape of cache it was checked against: (num_blocks, block_size).
    blocks: tuple[int, int]
    # [num_tokens] int64: where each token is stored, block * block_size + offset.
    slots: Tensor
    positions: Tensor
    _works: dict[int | None, tuple[PartitionWork, ...]] = field(default_factory=dict)

    @property
    def block_size(self) -> int:
        return self.blocks[1]

    def works(self, window: int | None) -> tuple[PartitionWork, ...]:
        """The partitions in ascending order."""
        if window not in self._works:
            starts = self.batch.query_starts.tolist()
            contexts = self.batch.context_lens.tolist()
            lows = range(0, max(contexts), KV_PARTITION)
            works = (_partition_work(self, starts, contexts, low, window) for low in lows)
            self._works[window] = tuple(work for work in works if work is not None)
        return self._works[window]


def plan_attention(batch: RaggedBatch, spec: KVCacheSpec) -> ReferencePlan:
    """Validates a batch and derives the plan; raises ValueError naming the first offending row."""
    starts, contexts = _checked_rows(batch, spec)
    positions = batch.positions.to(torch.int64)
    counts = starts[1:] - starts[:-1]
    rows = torch.repeat_interleave(torch.arange(batch.num_rows), counts)
    expected = torch.arange(batch.num_tokens) + (contexts - starts[1:])[rows]
    wrong = (positions != expected).nonzero()
    if len(wrong):
        token = int(wrong[0])
        raise ValueError(
            f"row {int(rows[token])}: token {token} has position {int(positions[token])}, "
            f"its context length says {int(expected[token])}"
        )
    blocks = batch.block_tables[rows, positions // spec.block_size].to(torch.int64)
    slots = blocks * spec.block_size + positions % spec.block_size
    return ReferencePlan(batch, (spec.num_blocks, spec.block_size), slots, positions)


def _checked_rows(batch: RaggedBatch, spec: KVCacheSpec) -> tuple[Tensor, Tensor]:
    """Query starts and context lengths as int64, once their shapes and ranges hold."""
    check_batch(batch)
    check_ends(batch)
    starts, contexts = batch.query_starts.to(torch.int64), batch.context_lens.to(torch.int64)
    counts = starts[1:] - starts[:-1]
    capacity = batch.block_tables.shape[1] * spec.block_size
    tables = batch.block_tables
    used = torch.arange(tables.shape[1]) < ((contexts + spec.block_size - 1) // spec.block_size)[:, None]
    faults = {
        "has no tokens": counts < 1,
        "has more tokens than its context length": counts > contexts,
        f"has a context over the {capacity} tokens of its block table": contexts > capacity,
        f"names a block outside 0..{spec.num_blocks - 1}": (used & ((tables < 0) | (tables >= spec.num_blocks))).any(1),
    }
    for fault, rows in faults.items():
        if rows.any():
            row = int(rows.nonzero()[0])
            raise ValueError(f"row {row} {fault} (tokens {int(counts[row])}, context length {int(contexts[row])})")
    return starts, contexts


def _partition_work(
    plan: ReferencePlan, starts: list[int], contexts: list[int], low: int, window: int | None
) -> PartitionWork | None:
    """The work on positions [low, low + KV_PARTITION); None when no token sees any of them."""
    spans: list[tuple[int, int, int]] = []
    for row, context in enumerate(contexts):
        # The step's token at position p is number p + shift.
        shift = starts[row + 1] - context
        begin = max(starts[row], low + shift)
        end = starts[row + 1] if window is None else min(starts[row + 1], low + shift + KV_PARTITION + window - 1)
        if begin < end:
            spans.append((row, begin, end))
    if not spans:
        return None
    spans.sort(key=lambda span: span[2] - span[1] > 1)
    num_singles = sum(end - begin == 1 for _, begin, end in spans)
    chunks, place = [], num_singles
    for index, (_, begin, end) in enumerate(spans[num_singles:], num_singles):
        chunks.append(Chunk(index, place, place + end - begin))
        place += end - begin
    tokens = torch.cat([torch.arange(begin, end) for _, begin, end in spans])
    in_order = torch.equal(tokens, torch.arange(plan.batch.num_tokens))
    seen = plan.positions[tokens]
    hidden = _hidden(seen, low, window)
    return PartitionWork(
        tokens=None if in_order else tokens,
        num_singles=num_singles,
        chunks=tuple(chunks),
        block_ids=_partition_blocks(plan, [row for row, _, _ in spans], low),
        stale=_stale_places([contexts[row] - low for row, _, _ in spans]),
        hidden=hidden if bool(hidden.any()) else None,
        is_first=low == 0 or (window is not None and int(seen.min()) - window + 1 >= low),
    )


def _hidden(seen: Tensor, low: int, window: int | None) -> Tensor:
    keys = torch.arange(low, low + KV_PARTITION)
    hidden = keys > seen[:, None]
    return hidden if window is None else hidden | (keys <= seen[:, None] - window)


def _partition_blocks(plan: ReferencePlan, rows: list[int], low: int) -> Tensor:
    """Block ids of a partition for each of `rows`, in one line."""
    per_partition = KV_PARTITION // plan.block_size
    first = low // plan.block_size
    table = plan.batch.block_tables[rows, first : first + per_partition]
    blocks = torch.zeros(len(rows), per_partition, dtype=torch.int64)
    used = (plan.batch.context_lens[rows] + plan.block_size - 1) // plan.block_size - first
    valid = torch.arange(table.shape[1]) < used[:, None]
    blocks[:, : table.shape[1]] = table.to(torch.int64).masked_fill(~valid, 0)
    return blocks.flatten()


def _stale_places(lengths: list[int]) -> Tensor | None:
    places = [
        torch.arange(place * KV_PARTITION + length, (place + 1) * KV_PARTITION)
        for place, length in enumerate(lengths)
        if length < KV_PARTITION
    ]
    return torch.cat(places) if places else None
