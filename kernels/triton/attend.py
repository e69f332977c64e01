"""The loop of attention, which decode and prefill share: queries of one KV head over a range of positions.

Knows one head of one row's blocks; knows no work list, no partitions and no output. Tiles that all queries see whole
need no mask, the others differ by the mask alone.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kernels.triton.heads import cast, head_dims, load_columns, load_rows
from kernels.triton.pages import tile_blocks, tile_rows
from kernels.triton.softmax import attend_tile, score_tile


class Sight(NamedTuple):
    """What queries see of a row, and how they weigh it."""

    # Pointers to the head's keys and values in block 0, and to the row's block ids.
    key_memory: tl.tensor
    value_memory: tl.tensor
    table: tl.tensor
    stride_block: tl.tensor
    # The last position that each query sees, [M]; None: whatever the range holds.
    last: tl.tensor
    # The first one, [M], or [1] for all; None: position 0.
    lowest: tl.tensor
    # See score_tile and attend_tile.
    scale: tl.tensor
    cap_scale: tl.tensor


@triton.jit
def attend_range(
    state,
    q,
    sight,
    first,
    end,
    part,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The state after the tiles of [first, end). Not MASKED: every query sees all of them, and they are whole.

    q has a head's tiles [M, D]; `state` holds the sums of a part of each: see head_dims. `first` is a multiple of
    TILE.
    """
    acc, total, highest = state
    COMPUTE: tl.constexpr = q[0].dtype
    MAIN_DIM: tl.constexpr = q[0].shape[1]
    REST_DIM: tl.constexpr = q[1].shape[1] if len(q) > 1 else 0
    dims = head_dims(0, 1, MAIN_DIM, REST_DIM)
    out_dims = head_dims(part, MAIN_DIM // acc[0].shape[1], MAIN_DIM, REST_DIM)
    offsets = tl.arange(0, TILE)
    blocks = tile_blocks(sight.table, first, end, BLOCK_SIZE, TILE)
    for t0 in range(first, end, TILE):
        position = t0 + offsets
        lines = tile_rows(blocks, position, sight.stride_block, BLOCK_SIZE, TILE, HEAD_DIM)
        blocks = tile_blocks(sight.table, t0 + TILE, end, BLOCK_SIZE, TILE)
        stored = position < end if MASKED else tl.full([1], True, tl.int1)
        k = load_columns(sight.key_memory, lines, stored, dims, HEAD_DIM)
        v = load_rows(sight.value_memory, lines, stored, out_dims, HEAD_DIM)
        scores = score_tile(q, cast(k, COMPUTE), sight.cap_scale)
        if MASKED:
            seen = stored[None, :]
            if sight.last is not None:
                seen = position[None, :] <= sight.last[:, None]
            if sight.lowest is not None:
                seen = seen & (position[None, :] >= sight.lowest[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        acc, total, highest = attend_tile(acc, total, highest, scores, cast(v, COMPUTE), sight.scale)
    return acc, total, highest
