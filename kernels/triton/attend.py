"""The loop of attention, which decode and prefill share: queries of one KV head over a range of positions.

Knows one head of one row's blocks; knows no work list, no partitions and no output. Tiles that all queries see whole
need no mask, the others differ by the mask alone.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

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
    first_dim,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """The state after the tiles of [first, end). Not MASKED: every query sees all of them, and they are whole.

    q is [M, padded head_dim]; `state` holds the sums of the values' dimensions from `first_dim` on. `first` is a
    multiple of TILE.
    """
    acc, total, highest = state
    offsets = tl.arange(0, TILE)
    dim = tl.arange(0, q.shape[1])
    real = dim < HEAD_DIM
    out_dim = first_dim + tl.arange(0, acc.shape[1])
    out_real = out_dim < HEAD_DIM
    blocks = tile_blocks(sight.table, first, end, BLOCK_SIZE, TILE)
    for t0 in range(first, end, TILE):
        position = t0 + offsets
        lines = tile_rows(blocks, position, sight.stride_block, BLOCK_SIZE, TILE, HEAD_DIM)
        blocks = tile_blocks(sight.table, t0 + TILE, end, BLOCK_SIZE, TILE)
        k_places = sight.key_memory + lines[None, :] + dim[:, None]
        v_places = sight.value_memory + lines[:, None] + out_dim[None, :]
        if MASKED:
            stored = position < end
            k = tl.load(k_places, mask=stored[None, :] & real[:, None], other=0.0)
            v = tl.load(v_places, mask=stored[:, None] & out_real[None, :], other=0.0)
        elif q.shape[1] != HEAD_DIM:
            k = tl.load(k_places, mask=real[:, None], other=0.0)
            v = tl.load(v_places, mask=out_real[None, :], other=0.0)
        else:
            k = tl.load(k_places)
            v = tl.load(v_places)
        scores = score_tile(q, k.to(q.dtype), sight.cap_scale)
        if MASKED:
            seen = stored[None, :]
            if sight.last is not None:
                seen = position[None, :] <= sight.last[:, None]
            if sight.lowest is not None:
                seen = seen & (position[None, :] >= sight.lowest[:, None])
            scores = tl.where(seen, scores, -float("inf"))
        acc, total, highest = attend_tile(acc, total, highest, scores, v.to(q.dtype), sight.scale)
    return acc, total, highest
