"""The loops of prefill: a block of queries over a range of positions, at once or by partitions.

Knows one block of queries and one KV head; knows no rows, no work list and no output. Tiles that all queries see whole
have no masks, the others differ by the mask alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.pages import tile_blocks, tile_rows
from kernels.triton.softmax import LOWEST, attend_tile, fold_weights, score_tile


@triton.jit
def _attend_range(
    acc,
    total,
    highest,
    q,
    keys,
    values,
    first_dim,
    table,
    first,
    end,
    positions,
    window,
    stride_block,
    scale,
    cap_scale,
    MASKED: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state after the tiles of [first, end): row m sees positions[m] and what lies before it, of which there are
    `window` with HAS_WINDOW; everything when not MASKED."""
    offsets = tl.arange(0, TILE)
    dim = tl.arange(0, PADDED_DIM)
    real = dim < HEAD_DIM
    out_dim = first_dim + tl.arange(0, OUT_DIM)
    out_real = out_dim < HEAD_DIM
    blocks = tile_blocks(table, first, end, BLOCK_SIZE, TILE)
    for t0 in range(first, end, TILE):
        position = t0 + offsets
        lines = tile_rows(blocks, position, stride_block, BLOCK_SIZE, TILE, HEAD_DIM)
        blocks = tile_blocks(table, t0 + TILE, end, BLOCK_SIZE, TILE)
        if MASKED:
            stored = position < end
            k = tl.load(keys + lines[None, :] + dim[:, None], mask=stored[None, :] & real[:, None], other=0.0)
            v = tl.load(values + lines[:, None] + out_dim[None, :], mask=stored[:, None] & out_real[None, :], other=0.0)
        elif PADDED_DIM != HEAD_DIM:
            k = tl.load(keys + lines[None, :] + dim[:, None], mask=real[:, None], other=0.0)
            v = tl.load(values + lines[:, None] + out_dim[None, :], mask=out_real[None, :], other=0.0)
        else:
            k = tl.load(keys + lines[None, :] + dim[:, None])
            v = tl.load(values + lines[:, None] + out_dim[None, :])
        scores = score_tile(q, k.to(COMPUTE), cap_scale, HAS_CAP, PRECISION)
        if MASKED:
            seen = position[None, :] <= positions[:, None]
            if HAS_WINDOW:
                seen = seen & (position[None, :] > (positions - window)[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        acc, total, highest = attend_tile(acc, total, highest, scores, v.to(COMPUTE), scale, PRECISION)
    return acc, total, highest


@triton.jit
def tile_bounds(first_position, last_position, window, HAS_WINDOW: tl.constexpr, TILE: tl.constexpr):
    """For a block of queries from the first position to the last: tiles [first, inner) are cut by the window's edge,
    [inner, edge) are full and [edge, end) are cut by the diagonal."""
    end = last_position + 1
    first = 0
    inner = 0
    if HAS_WINDOW:
        first = tl.maximum(first_position - window + 1, 0) // TILE * TILE
        inner = (tl.maximum(last_position - window + 1, 0) + TILE - 1) // TILE * TILE
        inner = tl.minimum(tl.maximum(inner, first), end)
    edge = tl.maximum((first_position + 1) // TILE * TILE, inner)
    return first, inner, edge, end


@triton.jit
def attend_at_once(
    q,
    keys,
    values,
    first_dim,
    table,
    first,
    inner,
    edge,
    end,
    positions,
    window,
    stride_block,
    scale,
    cap_scale,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One running softmax over all positions: the sum of weighted values and that of weights."""
    acc = tl.zeros([BLOCK_M, OUT_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    if HAS_WINDOW:
        acc, total, highest = _attend_range(
            acc, total, highest, q, keys, values, first_dim, table, first, inner, positions, window,
            stride_block, scale, cap_scale, True,
            HAS_CAP, HAS_WINDOW, HEAD_DIM, PADDED_DIM, OUT_DIM, BLOCK_SIZE, TILE, COMPUTE, PRECISION,
        )  # fmt: skip
    acc, total, highest = _attend_range(
        acc, total, highest, q, keys, values, first_dim, table, inner, edge, positions, window,
        stride_block, scale, cap_scale, False,
        HAS_CAP, HAS_WINDOW, HEAD_DIM, PADDED_DIM, OUT_DIM, BLOCK_SIZE, TILE, COMPUTE, PRECISION,
    )  # fmt: skip
    acc, total, highest = _attend_range(
        acc, total, highest, q, keys, values, first_dim, table, edge, end, positions, window,
        stride_block, scale, cap_scale, True,
        HAS_CAP, HAS_WINDOW, HEAD_DIM, PADDED_DIM, OUT_DIM, BLOCK_SIZE, TILE, COMPUTE, PRECISION,
    )  # fmt: skip
    return acc, total


@triton.jit
def attend_partitions(
    q,
    keys,
    values,
    first_dim,
    table,
    first,
    end,
    positions,
    window,
    stride_block,
    scale,
    cap_scale,
    HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    PARTITION: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each partition by itself, folded ascending: the sum of weighted values and that of weights."""
    acc = tl.zeros([BLOCK_M, OUT_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    highest = tl.full([BLOCK_M], LOWEST, tl.float32)
    for low in range(first // PARTITION * PARTITION, end, PARTITION):
        part, part_total, part_highest = _attend_range(
            tl.zeros([BLOCK_M, OUT_DIM], tl.float32), tl.zeros([BLOCK_M], tl.float32),
            tl.full([BLOCK_M], LOWEST, tl.float32), q, keys, values, first_dim, table, tl.maximum(low, first),
            tl.minimum(low + PARTITION, end), positions, window, stride_block, scale, cap_scale, True,
            HAS_CAP, HAS_WINDOW, HEAD_DIM, PADDED_DIM, OUT_DIM, BLOCK_SIZE, TILE, COMPUTE, PRECISION,
        )  # fmt: skip
        highest, keep, add = fold_weights(highest, part_highest)
        total = tl.fma(part_total, add, total * keep)
        acc = tl.fma(part, add[:, None], acc * keep[:, None])
    return acc, total
