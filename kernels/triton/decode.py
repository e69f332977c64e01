"""Attention of rows of one token: fixed partitions, a constant number of programs, partial results folded in order.

Knows queries, the cache of one layer and a work list; knows no prompts. A work item is (row, partition of
KV_PARTITION positions, KV head). As many programs as the device holds at once take items in turn, whatever the
batch, so a launch fits any replay of a CUDA graph; which program takes an item changes no bit. The query heads of a
KV head fill the rows of one tile.

Partial results take num_heads * (head_dim + 2) floats per partition. Where those of all rows might exceed the
scratch memory, the work is done in rounds: each folds its partitions onto the state that the round before left,
which is the same fold cut into pieces.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.api import KV_PARTITION
from kernels.triton.attend import Sight, attend_range
from kernels.triton.launch import UNFUSED
from kernels.triton.layer import LayerAttention
from kernels.triton.metadata import TritonPlan, find_row
from kernels.triton.softmax import empty_state, fold


@triton.jit
def _partition(DECODE_STARTS, CONTEXTS, item, num_rows, window, PARTITION: tl.constexpr, TILE: tl.constexpr):
    """Of a partition by its number among all rows': its row, the range [first, end) that it takes, and the first
    position that the row's token sees."""
    row = find_row(DECODE_STARTS, item, num_rows)
    context = tl.load(CONTEXTS + row)
    lowest = 0
    if window is not None:
        lowest = tl.maximum(context - window, 0)
    partition = lowest // PARTITION + item - tl.load(DECODE_STARTS + row)
    first = tl.maximum(partition * PARTITION, lowest // TILE * TILE)
    return row, first, tl.minimum((partition + 1) * PARTITION, context), lowest


@triton.jit(
    do_not_specialize=["num_rows", "first_item", "capacity", "table_stride", "window"],
    do_not_specialize_on_alignment=["TABLES", "QUERY_STARTS", "CONTEXTS", "DECODE_STARTS"],
)
def _decode_partitions(
    QUERY,
    KEYS,
    VALUES,
    TABLES,
    QUERY_STARTS,
    CONTEXTS,
    DECODE_STARTS,
    PARTIALS,
    STATES,
    num_rows,
    first_item,
    capacity,
    query_stride,
    table_stride,
    stride_block,
    scale,
    cap_scale,
    window,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PARTITION: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    HEAD_BLOCK: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    member = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, PADDED_DIM)
    num_items = tl.minimum(tl.load(DECODE_STARTS + num_rows) - first_item, capacity)
    for work in range(tl.program_id(0), num_items * KV_HEADS, tl.num_programs(0)):
        place = work // KV_HEADS
        kv_head = work % KV_HEADS
        row, first, end, first_seen = _partition(
            DECODE_STARTS, CONTEXTS, first_item + place, num_rows, window, PARTITION, TILE
        )
        heads = kv_head * GROUP + member
        token = tl.load(QUERY_STARTS + row).to(tl.int64)
        within = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
        q = tl.load(QUERY + token * query_stride + heads[:, None] * HEAD_DIM + dim[None, :], mask=within, other=0.0)
        table = TABLES + row.to(tl.int64) * table_stride
        lowest = None
        if window is not None:
            lowest = tl.full([1], first_seen, tl.int32)
        keys, values = KEYS + kv_head * HEAD_BLOCK, VALUES + kv_head * HEAD_BLOCK
        sight = Sight(keys, values, table, stride_block, None, lowest, scale, cap_scale)
        acc, total, highest = attend_range(
            empty_state(BLOCK_M, PADDED_DIM), q.to(COMPUTE), sight, first, end, 0, True, HEAD_DIM, BLOCK_SIZE, TILE
        )
        line = tl.cast(place, tl.int64) * (KV_HEADS * GROUP) + heads
        tl.store(PARTIALS + line[:, None] * PADDED_DIM + dim[None, :], acc, mask=(member < GROUP)[:, None])
        tl.store(STATES + line * 2, highest, mask=member < GROUP)
        tl.store(STATES + line * 2 + 1, total, mask=member < GROUP)


@triton.jit
def _load_state(PARTIALS, STATES, line, D: tl.constexpr):
    """The state of one query: see empty_state."""
    acc = tl.load(PARTIALS + line * D + tl.arange(0, D)[None, :])
    places = STATES + line * 2 + tl.arange(0, 1)
    return acc, tl.load(places + 1), tl.load(places)


@triton.jit(
    do_not_specialize=["first_item", "capacity", "is_last", "num_tokens"],
    do_not_specialize_on_alignment=["QUERY_STARTS", "DECODE_STARTS"],
)
def _fold_partitions(
    PARTIALS,
    STATES,
    FOLDED,
    FOLDED_STATES,
    QUERY_STARTS,
    DECODE_STARTS,
    OUT,
    first_item,
    capacity,
    is_last,
    num_tokens,
    value_scale,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """One program per (row, head): this round's partitions, ascending, onto what earlier rounds left.

    The first round begins at item 0. A faulty row may name a token that the step does not have.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(QUERY_STARTS + row)
    if (tl.load(QUERY_STARTS + row + 1) - token != 1) | (token < 0) | (token >= num_tokens):
        return
    line = row.to(tl.int64) * NUM_HEADS + head
    state = empty_state(1, PADDED_DIM)
    if first_item > 0:
        state = _load_state(FOLDED, FOLDED_STATES, line, PADDED_DIM)
    begin = tl.maximum(tl.load(DECODE_STARTS + row) - first_item, 0)
    end = tl.minimum(tl.load(DECODE_STARTS + row + 1) - first_item, capacity)
    # Unrolled, the loads of several partitions are on their way at once: a long context has hundreds.
    for place in tl.range(begin, end, loop_unroll_factor=8):
        part = tl.cast(place, tl.int64) * NUM_HEADS + head
        state = fold(state, _load_state(PARTIALS, STATES, part, PADDED_DIM))
    acc, total, highest = state
    dim = tl.arange(0, PADDED_DIM)[None, :]
    if is_last != 0:
        # A padding row has seen nothing: zero by one.
        result = acc / tl.where(total > 0, total, 1.0)[:, None] * value_scale
        out = OUT + token.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + dim
        tl.store(out, result.to(OUT.dtype.element_ty), mask=dim < HEAD_DIM)
    else:
        tl.store(FOLDED + line * PADDED_DIM + dim, acc)
        places = FOLDED_STATES + line * 2 + tl.arange(0, 1)
        tl.store(places, highest)
        tl.store(places + 1, total)


def decode_attention(
    qkv: Tensor, kv: tuple[Tensor, Tensor], plan: TritonPlan, layer: LayerAttention, out: Tensor
) -> None:
    """Writes the attention of the plan's one-token rows into `out` [num_tokens, num_heads * head_dim].

    `kv` is one layer's keys and values, each [num_blocks, num_kv_heads, block_size, head_dim], contiguous.
    """
    batch, heads, padded, config = plan.batch, layer.num_heads, layer.padded_dim, layer.decode
    starts = plan.work(layer.window, layer.group, layer.prefill.block_m).decode_starts
    most = batch.num_rows * max(1, -(-batch.max_context_len // KV_PARTITION))
    capacity = min(most, max(1, layer.scratch_bytes // (heads * (padded + 2) * 4)))
    partials, states = plan.scratch(capacity, heads, padded), plan.scratch(capacity, heads, 2)
    rounds = -(-most // capacity)
    folded = (partials, states)
    if rounds > 1:
        folded = plan.scratch(1, batch.num_rows, heads, padded), plan.scratch(1, batch.num_rows, heads, 2)
    for number in range(rounds):
        _decode_partitions[(layer.num_decode_programs,)](
            qkv,
            *kv,
            batch.block_tables,
            batch.query_starts,
            plan.contexts,
            starts,
            partials,
            states,
            batch.num_rows,
            number * capacity,
            capacity,
            qkv.stride(0),
            batch.block_tables.stride(0),
            kv[0].stride(0),
            **layer.kernel_arguments,
            BLOCK_M=config.block_m,
            TILE=config.tile,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        _fold_partitions[(batch.num_rows, heads)](
            partials,
            states,
            *folded,
            batch.query_starts,
            starts,
            out,
            number * capacity,
            capacity,
            int(number == rounds - 1),
            batch.num_tokens,
            layer.value_scale,
            NUM_HEADS=heads,
            HEAD_DIM=layer.head_dim,
            PADDED_DIM=padded,
            num_warps=1,
            **UNFUSED,
        )
