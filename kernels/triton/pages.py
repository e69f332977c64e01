"""How kernels walk a block table: the ids of a tile's blocks, loaded one tile ahead, and the rows they name.

Knows block tables and tiles; knows no values. Ids that are carried from one turn of a loop to the next keep the
compiler's pipeline of keys and values two tiles deep; loaded in the same turn they take its stages away.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_blocks(TABLE, t0, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Ids [max(1, TILE / BLOCK_SIZE)] of the blocks of positions t0 .. t0 + TILE; 0 where one begins past `end`."""
    COUNT: tl.constexpr = TILE // BLOCK_SIZE if TILE > BLOCK_SIZE else 1
    places = tl.arange(0, COUNT)
    return tl.load(TABLE + t0 // BLOCK_SIZE + places, mask=t0 + places * BLOCK_SIZE < end, other=0)


@triton.jit
def tile_rows(blocks, positions, stride_block, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where each of a tile's positions lies in the cache of one head [block, ..., token, dim], in elements, int64."""
    COUNT: tl.constexpr = TILE // BLOCK_SIZE if TILE > BLOCK_SIZE else 1
    spread = tl.reshape(tl.broadcast_to(blocks[:, None], (COUNT, TILE // COUNT)), (TILE,))
    return spread.to(tl.int64) * stride_block + (positions % BLOCK_SIZE) * HEAD_DIM
