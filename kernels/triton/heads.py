"""A head's dimensions as the kernels hold them: tuples of one tile or two, as the sides of a tile are powers of two.

96 dimensions are 64 and 32, 80 too, and 128 are one tile. Tiles may be cut into equal parts, of which a program takes
the same one of each. Knows dimensions; knows no positions and no arithmetic of attention.
"""

from __future__ import annotations

import triton
import triton.language as tl


def head_tiles(head_dim: int) -> tuple[int, int]:
    """Dimensions of the two tiles, those past the head's end among them; the second has 0 where one takes them all.

    Narrower than 32 the second would cost an fp8 cache more than it saves: its rows would be converted byte by byte.
    """
    padded = max(16, 1 << (head_dim - 1).bit_length())
    rest = max(32, 1 << (head_dim - padded // 2 - 1).bit_length())
    return (padded // 2, rest) if rest < padded // 2 else (padded, 0)


@triton.jit
def head_dims(part, PARTS: tl.constexpr, MAIN_DIM: tl.constexpr, REST_DIM: tl.constexpr):
    """The dimensions of a part of each tile."""
    dims = (tl.arange(0, MAIN_DIM // PARTS) + part * (MAIN_DIM // PARTS),)
    if REST_DIM > 0:
        rest = tl.arange(0, REST_DIM // PARTS) + MAIN_DIM + part * (REST_DIM // PARTS)
        dims += (rest,)  # type: ignore[assignment]
    return dims


@triton.jit
def load_rows(memory, lines, within, dims, HEAD_DIM: tl.constexpr):
    """Tiles [lines, dims] of `memory`; zeros for lines that are not `within`, and for dimensions past the head's."""
    return [
        tl.load(memory + lines[:, None] + dim[None, :], within[:, None] & (dim < HEAD_DIM)[None, :], other=0.0)
        for dim in dims
    ]


@triton.jit
def load_columns(memory, lines, within, dims, HEAD_DIM: tl.constexpr):
    """Tiles [dims, lines] of `memory`: see load_rows."""
    return [
        tl.load(memory + lines[None, :] + dim[:, None], within[None, :] & (dim < HEAD_DIM)[:, None], other=0.0)
        for dim in dims
    ]


@triton.jit
def store_rows(memory, lines, within, dims, tiles, HEAD_DIM: tl.constexpr):
    """Writes tiles where load_rows would read them."""
    for i in tl.static_range(len(dims)):
        places = memory + lines[:, None] + dims[i][None, :]
        mask = within[:, None] & (dims[i] < HEAD_DIM)[None, :]
        tl.store(places, tiles[i].to(memory.dtype.element_ty), mask)


@triton.jit
def cast(tiles, DTYPE: tl.constexpr):
    """The tiles in a dtype."""
    return [tile.to(DTYPE) for tile in tiles]
