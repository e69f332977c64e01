"""What the attention kernels derive from a step's ragged batch, computed on the device and never read by the host.

Knows lengths, block tables and windows; knows no keys or values. Launches depend on nothing but the batch's sizes,
so a plan made inside a CUDA graph's capture is made anew by each replay from what the batch's tensors then hold. A
padding row of such a batch has one token, position 0 and context length 0: nothing is stored for it and its output
is zero.

    row                   0        1            2        3
    tokens                1        300          1        70        one token: decode; several: prefill
    decode_starts     0        3            3        4        4    partitions of decode rows, summed
    prefill_starts    0        0            10       10       13   query blocks of prefill rows, summed
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.api import KV_PARTITION, KVCacheSpec, RaggedBatch
from kernels.contracts import check_batch
from kernels.triton.launch import UNFUSED

_ROWS_AT_ONCE = 256
_FAULTS = (
    "",
    "has no tokens: query_starts must ascend strictly",
    "has tokens outside 0..num_tokens: query_starts must run from 0 to num_tokens over at least one row",
    "has more tokens than its context length",
    "has a context over the {capacity} tokens of its block table",
    "names a block outside 0..{last_block}",
    "has a token at another position than its context length says",
)


@triton.jit(
    do_not_specialize=["table_stride", "max_blocks", "num_blocks", "num_tokens"],
    do_not_specialize_on_alignment=[
        "QUERY_STARTS",
        "CONTEXT_LENS",
        "BLOCK_TABLES",
        "POSITIONS",
        "SLOTS",
        "CONTEXTS",
        "FAULTS",
    ],
)
def _check_rows(
    QUERY_STARTS,
    CONTEXT_LENS,
    BLOCK_TABLES,
    POSITIONS,
    SLOTS,
    CONTEXTS,
    FAULTS,
    table_stride,
    max_blocks,
    num_blocks,
    num_tokens,
    BLOCK_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per row: its fault (0: none), its context length (0 with a fault), its tokens' slots (-1: none)."""
    row = tl.program_id(0)
    start = tl.load(QUERY_STARTS + row)
    end = tl.load(QUERY_STARTS + row + 1)
    context = tl.load(CONTEXT_LENS + row)
    count = end - start
    has_context = (context != 0) | (count != 1)
    last = row == tl.num_programs(0) - 1
    outside = (start < 0) | (end > num_tokens) | ((row == 0) & (start != 0)) | (last & (end != num_tokens))
    fault = tl.where(context > max_blocks * BLOCK_SIZE, 4, 0)
    fault = tl.where((count > context) & has_context, 3, fault)
    fault = tl.where(outside, 2, fault)
    fault = tl.where(count < 1, 1, fault)
    offsets = tl.arange(0, CHUNK)
    table = BLOCK_TABLES + row.to(tl.int64) * table_stride
    used = tl.where(fault == 0, (context + BLOCK_SIZE - 1) // BLOCK_SIZE, 0)
    for first in range(0, used, CHUNK):
        block = tl.load(table + first + offsets, mask=first + offsets < used, other=0)
        bad = tl.max(((block < 0) | (block >= num_blocks)).to(tl.int32), 0)
        fault = tl.where(bad > 0, 5, fault)
    # Tokens are visited when the memory of all of them is known to exist.
    visited = tl.where(outside | (count < 1), 0, count)
    stored = (fault == 0) & has_context
    for first in range(0, visited, CHUNK):
        here = first + offsets < visited
        position = context - count + first + offsets
        given = tl.load(POSITIONS + start + first + offsets, mask=here, other=0)
        wrong = here & (given != position) & stored
        fault = tl.where(tl.max(wrong.to(tl.int32), 0) > 0, 6, fault)
        known = here & stored & (given == position)
        block = tl.load(table + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        slot = tl.where(known, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(SLOTS + start + first + offsets, slot, mask=here)
    tl.store(CONTEXTS + row, tl.where(fault == 0, context, 0))
    tl.store(FAULTS + row, fault)


@triton.jit(
    do_not_specialize=["num_rows", "window"],
    do_not_specialize_on_alignment=["QUERY_STARTS", "CONTEXTS", "DECODE_STARTS", "PREFILL_STARTS"],
)
def _sum_work(
    QUERY_STARTS,
    CONTEXTS,
    DECODE_STARTS,
    PREFILL_STARTS,
    num_rows,
    window,
    GROUP: tl.constexpr,
    PREFILL_M: tl.constexpr,
    PARTITION: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program: running sums of the decode rows' partitions and of the prefill rows' query blocks."""
    offsets = tl.arange(0, CHUNK)
    partitions = 0
    query_blocks = 0
    for first in range(0, num_rows, CHUNK):
        row = first + offsets
        here = row < num_rows
        count = tl.load(QUERY_STARTS + row + 1, mask=here, other=0) - tl.load(QUERY_STARTS + row, mask=here, other=0)
        context = tl.load(CONTEXTS + row, mask=here, other=0)
        lowest = tl.zeros_like(context)
        if window is not None:
            lowest = tl.maximum(context - window, 0) // PARTITION
        decode = tl.where(count == 1, (context + PARTITION - 1) // PARTITION - lowest, 0)
        prefill = tl.where((count > 1) & (context > 0), (count * GROUP + PREFILL_M - 1) // PREFILL_M, 0)
        decode_end = partitions + tl.cumsum(decode, 0)
        prefill_end = query_blocks + tl.cumsum(prefill, 0)
        tl.store(DECODE_STARTS + row + 1, decode_end, mask=here)
        tl.store(PREFILL_STARTS + row + 1, prefill_end, mask=here)
        partitions += tl.sum(decode, 0)
        query_blocks += tl.sum(prefill, 0)
    tl.store(DECODE_STARTS, 0)
    tl.store(PREFILL_STARTS, 0)


@triton.jit
def find_row(STARTS, item, num_rows):
    """The row that owns `item`: the largest r with STARTS[r] <= item, for item below STARTS[num_rows]."""
    low = 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        if tl.load(STARTS + middle + 1) <= item:
            low = middle + 1
        else:
            high = middle
    return low


@dataclass(frozen=True)
class WorkList:
    """Running sums [num_rows + 1] int32 of decode partitions and of prefill query blocks."""

    decode_starts: Tensor
    prefill_starts: Tensor


@dataclass(frozen=True)
class TritonPlan:
    """A step's attention plan. What depends on a layer's window and heads is derived when a layer first asks."""

    batch: RaggedBatch
    # The shape of cache it was made for: (num_blocks, block_size).
    blocks: tuple[int, int]
    # [num_tokens] int64: block * block_size + offset; -1 where nothing is stored.
    slots: Tensor
    # [num_rows] int32: context lengths, 0 for rows with a fault.
    contexts: Tensor
    # [num_rows] int32: 0, or what is wrong with the row; see fault_message.
    faults: Tensor
    _works: dict[tuple[int | None, int, int], WorkList] = field(default_factory=dict)
    _scratches: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @property
    def has_prefill(self) -> bool:
        return self.batch.max_query_len > 1

    @property
    def has_decode(self) -> bool:
        """Whether a row may have one token: all but a lone row of several, as far as sizes tell."""
        return self.batch.num_rows > 1 or self.batch.num_tokens == 1

    def work(self, window: int | None, group: int, prefill_m: int) -> WorkList:
        """The work list of layers with that window and `group` query heads per KV head."""
        key = (window, group, prefill_m)
        if key not in self._works:
            starts = self.contexts.new_empty((2, self.batch.num_rows + 1))
            _sum_work[(1,)](
                self.batch.query_starts,
                self.contexts,
                starts[0],
                starts[1],
                self.batch.num_rows,
                window,
                GROUP=group,
                PREFILL_M=prefill_m,
                PARTITION=KV_PARTITION,
                CHUNK=_ROWS_AT_ONCE,
                num_warps=4,
                **UNFUSED,
            )
            self._works[key] = WorkList(starts[0], starts[1])
        return self._works[key]

    def scratch(self, *shape: int) -> Tensor:
        """Uninitialised fp32 memory of that shape, shared by the layers: they run one after the other."""
        if shape not in self._scratches:
            self._scratches[shape] = torch.empty(shape, dtype=torch.float32, device=self.slots.device)
        return self._scratches[shape]


def plan_attention(batch: RaggedBatch, spec: KVCacheSpec) -> TritonPlan:
    """Launches the row checks. Raises ValueError for wrong shapes; what tensors hold shows in `faults`."""
    check_batch(batch)
    device = batch.block_tables.device
    slots = torch.empty(batch.num_tokens, dtype=torch.int64, device=device)
    rows = torch.empty((2, batch.num_rows), dtype=torch.int32, device=device)
    max_blocks = batch.block_tables.shape[1]
    _check_rows[(batch.num_rows,)](
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        batch.positions,
        slots,
        rows[0],
        rows[1],
        max_blocks,
        max_blocks,
        spec.num_blocks,
        batch.num_tokens,
        BLOCK_SIZE=spec.block_size,
        CHUNK=256,
        num_warps=4,
        **UNFUSED,
    )
    return TritonPlan(batch, (spec.num_blocks, spec.block_size), slots, rows[0], rows[1])


def fault_message(plan: TritonPlan) -> str:
    """What is wrong with the first faulty row, "" when no row is. Waits for the device."""
    faulty = plan.faults.nonzero().flatten()
    if not len(faulty):
        return ""
    row = int(faulty[0])
    num_blocks, block_size = plan.blocks
    fault = _FAULTS[int(plan.faults[row])].format(
        capacity=plan.batch.block_tables.shape[1] * block_size, last_block=num_blocks - 1
    )
    count = int(plan.batch.query_starts[row + 1] - plan.batch.query_starts[row])
    return f"row {row} {fault} (tokens {count}, context length {int(plan.batch.context_lens[row])})"
