"""Memory for a KV cache before it is needed, a page at a time.

The system finds memory at its first touch, and a huge page may take milliseconds. All layers come to their next page
with the same block, so that one step in a thousand tokens would wait for as many pages as there are layers. Here every
block that comes into use brings its share of the next pages with it. Knows addresses and the highest block in use.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys

from torch import Tensor

# A huge page.
_PIECE_BYTES = 2 * 2**20

# Linux from 5.14 on: pages are there as if they had been written to, and what is in them stays.
_MADV_POPULATE_WRITE = 23


class PagesAhead:
    """Asks for pages piece by piece: a stripe of blocks has one in each layer, of about a huge page."""

    def __init__(self, data: Tensor) -> None:
        """`data`: [layer, block, ...], contiguous, in pages of its own, which the caller keeps."""
        self._num_layers, self._num_blocks = data.shape[:2]
        self._block_bytes, self._layer_bytes = (data.stride(dim) * data.element_size() for dim in (1, 0))
        self._address = data.data_ptr()
        self._stripe_blocks = max(1, _PIECE_BYTES // max(1, self._block_bytes))
        # A cache of one stripe has nothing to gain.
        is_worth_it = sys.platform == "linux" and self._num_blocks > self._stripe_blocks
        self._advise = ctypes.CDLL(None).madvise if is_worth_it else None
        self._num_pieces = 0  # that are ready or passed over: all those of a stripe, then those of the next

    @property
    def num_ready_blocks(self) -> int:
        """The first so many blocks have their pages in all layers, or were passed over."""
        return min(self._num_pieces // self._num_layers * self._stripe_blocks, self._num_blocks)

    def reach(self, block: int) -> None:
        """This block is about to be used: those of its stripe are ready then, and as much of the next stripe as there
        is of this one before it."""
        if self._advise is None:
            return
        stripe, place = divmod(block, self._stripe_blocks)
        num_wanted = (stripe + 1) * self._num_layers + self._num_layers * (place + 1) // self._stripe_blocks
        # Stripes that were passed over are left to the first touch: a step never waits for more than it needs.
        self._num_pieces = max(self._num_pieces, stripe * self._num_layers)
        num_wanted = min(num_wanted, math.ceil(self._num_blocks / self._stripe_blocks) * self._num_layers)
        while self._num_pieces < num_wanted and self._advise is not None:
            self._ask_for(*divmod(self._num_pieces, self._num_layers))

    def _ask_for(self, stripe: int, layer: int) -> None:
        first, last = (min(each * self._stripe_blocks, self._num_blocks) for each in (stripe, stripe + 1))
        begin = self._address + layer * self._layer_bytes + first * self._block_bytes
        end = begin + (last - first) * self._block_bytes
        begin = begin // mmap.PAGESIZE * mmap.PAGESIZE
        # ctypes lets Python's other threads run meanwhile.
        if self._advise is not None and self._advise(
            ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_POPULATE_WRITE
        ):
            self._advise = None  # a system that does not know it
            return
        self._num_pieces += 1
