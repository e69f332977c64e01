"""Attention of rows of several tokens: prompts and their chunks, over whatever prefix the cache holds.

Knows queries, the cache of one layer and a work list; knows no decode rows. A program takes BLOCK_M consecutive
pairs (token, query head of one KV head) of a row, so that a tile of keys serves a whole group. Keys and values are
read from the cache, those of this very step too. Heaviest blocks go first.

PARTITIONED computes each partition of KV_PARTITION positions by itself and folds them ascending, which is decode's
arithmetic: a token gets the same bits in a chunk of any length. Without it one running softmax goes over all
positions. Partitions need the sum so far beside their own, which large heads have no registers for: OUT_PARTS programs
then share a block of queries, each computing all scores and a part of the output's dimensions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.attend import Sight, attend_range
from kernels.triton.layer import LayerAttention
from kernels.triton.metadata import TritonPlan, find_row
from kernels.triton.softmax import empty_state, fold


@triton.jit
def _queries(QUERY_STARTS, PREFILL_STARTS, row, query_block, BLOCK_M: tl.constexpr):
    """Of a block of queries: its row's first token in the step, the row's tokens, its first pair in the row.

    Asked before the loops and again after them: what is kept in between is registers that large heads do not have.
    """
    start = tl.load(QUERY_STARTS + row, volatile=True)
    count = tl.load(QUERY_STARTS + row + 1, volatile=True) - start
    first_pair = (query_block - tl.load(PREFILL_STARTS + row, volatile=True)) * BLOCK_M
    return start, count, first_pair


@triton.jit
def _tile_bounds(first_position, last_position, window, TILE: tl.constexpr):
    """For a block of queries from the first position to the last: tiles [first, inner) are cut by the window's edge,
    [inner, edge) are full and [edge, end) are cut by the diagonal."""
    end = last_position + 1
    first = 0
    inner = 0
    if window is not None:
        first = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        inner = (tl.maximum(last_position - window + 1, 0) + TILE - 1) // TILE * TILE
        inner = tl.minimum(tl.maximum(inner, first), end)
    edge = tl.maximum((first_position + 1) // TILE * TILE, inner)
    return first, inner, edge, end


@triton.jit
def _attend_at_once(
    state, q, sight, bounds, first_dim, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):
    """One running softmax over all positions."""
    first, inner, edge, end = bounds
    if sight.lowest is not None:
        state = attend_range(state, q, sight, first, inner, first_dim, True, HEAD_DIM, BLOCK_SIZE, TILE)
    state = attend_range(state, q, sight, inner, edge, first_dim, False, HEAD_DIM, BLOCK_SIZE, TILE)
    return attend_range(state, q, sight, edge, end, first_dim, True, HEAD_DIM, BLOCK_SIZE, TILE)


@triton.jit
def _attend_partitions(
    state,
    q,
    sight,
    bounds,
    first_dim,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    PARTITION: tl.constexpr,
):
    """Each partition by itself, folded ascending."""
    first, end = bounds[0], bounds[3]
    for low in range(first // PARTITION * PARTITION, end, PARTITION):
        begin, stop = tl.maximum(low, first), tl.minimum(low + PARTITION, end)
        part = empty_state(state[0].shape[0], state[0].shape[1])
        part = attend_range(part, q, sight, begin, stop, first_dim, True, HEAD_DIM, BLOCK_SIZE, TILE)
        state = fold(state, part)
    return state


@triton.jit(
    do_not_specialize=["num_rows", "table_stride", "window"],
    do_not_specialize_on_alignment=["TABLES", "QUERY_STARTS", "CONTEXTS", "PREFILL_STARTS"],
)
def _prefill(
    QUERY,
    KEYS,
    VALUES,
    TABLES,
    QUERY_STARTS,
    CONTEXTS,
    PREFILL_STARTS,
    OUT,
    num_rows,
    query_stride,
    table_stride,
    stride_block,
    scale,
    cap_scale,
    value_scale,
    window,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PARTITION: tl.constexpr,
    PARTITIONED: tl.constexpr,
    OUT_PARTS: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    HEAD_BLOCK: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    OUT_DIM: tl.constexpr = PADDED_DIM // OUT_PARTS
    SHARE: tl.constexpr = KV_HEADS * OUT_PARTS
    query_block = tl.num_programs(0) // SHARE - 1 - tl.program_id(0) // SHARE
    kv_head = tl.program_id(0) % SHARE // OUT_PARTS
    first_dim = tl.program_id(0) % OUT_PARTS * OUT_DIM
    if query_block >= tl.load(PREFILL_STARTS + num_rows):
        return
    row = find_row(PREFILL_STARTS, query_block, num_rows)
    start, count, first_pair = _queries(QUERY_STARTS, PREFILL_STARTS, row, query_block, BLOCK_M)
    context = tl.load(CONTEXTS + row)
    pair = first_pair + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, PADDED_DIM)
    within = (pair // GROUP < count)[:, None] & (dim < HEAD_DIM)[None, :]
    line = (start + pair // GROUP).to(tl.int64)[:, None] * query_stride
    column = ((kv_head * GROUP + pair % GROUP) * HEAD_DIM)[:, None]
    q = tl.load(QUERY + line + column + dim[None, :], mask=within, other=0.0).to(COMPUTE)
    earlier = context - count
    last_position = tl.minimum(earlier + (first_pair + BLOCK_M - 1) // GROUP, context - 1)
    bounds = _tile_bounds(earlier + first_pair // GROUP, last_position, window, TILE)
    table = TABLES + row.to(tl.int64) * table_stride
    keys, values = KEYS + kv_head * HEAD_BLOCK, VALUES + kv_head * HEAD_BLOCK
    last = earlier + pair // GROUP
    lowest = None
    if window is not None:
        lowest = last - window + 1
    sight = Sight(keys, values, table, stride_block, last, lowest, scale, cap_scale)
    state = empty_state(BLOCK_M, OUT_DIM)
    if PARTITIONED:
        state = _attend_partitions(state, q, sight, bounds, first_dim, HEAD_DIM, BLOCK_SIZE, TILE, PARTITION)
    else:
        state = _attend_at_once(state, q, sight, bounds, first_dim, HEAD_DIM, BLOCK_SIZE, TILE)
    acc, total = state[0], state[1]
    start, count, first_pair = _queries(QUERY_STARTS, PREFILL_STARTS, row, query_block, BLOCK_M)
    pair = first_pair + tl.arange(0, BLOCK_M)
    line = (start + pair // GROUP).to(tl.int64)[:, None] * (KV_HEADS * GROUP * HEAD_DIM)
    column = ((kv_head * GROUP + pair % GROUP) * HEAD_DIM)[:, None]
    out_dim = first_dim + tl.arange(0, OUT_DIM)
    within = (pair // GROUP < count)[:, None] & (out_dim < HEAD_DIM)[None, :]
    result = acc / total[:, None] * value_scale
    tl.store(OUT + line + column + out_dim[None, :], result.to(OUT.dtype.element_ty), mask=within)


def prefill_attention(
    qkv: Tensor, kv: tuple[Tensor, Tensor], plan: TritonPlan, layer: LayerAttention, out: Tensor
) -> None:
    """Writes the attention of the plan's rows of several tokens into `out`; arguments as decode_attention's."""
    batch, config = plan.batch, layer.prefill
    starts = plan.work(layer.window, layer.group, config.block_m).prefill_starts
    # Each row has at most one block more than its pairs fill.
    most = batch.num_tokens * layer.group // config.block_m + batch.num_rows
    _prefill[(most * layer.num_kv_heads * config.out_parts,)](
        qkv,
        *kv,
        batch.block_tables,
        batch.query_starts,
        plan.contexts,
        starts,
        out,
        batch.num_rows,
        qkv.stride(0),
        batch.block_tables.stride(0),
        kv[0].stride(0),
        value_scale=layer.value_scale,
        **layer.kernel_arguments,
        PARTITIONED=layer.partitioned,
        OUT_PARTS=config.out_parts,
        BLOCK_M=config.block_m,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
