"""The blocks of one memory: who is held how often, and in which order the others are given out.

Knows numbers of blocks alone; must not know tokens, hashes (only which blocks its caller calls findable) or sequences.

    given out first                                                    given out last
    [ blank: nothing worth keeping, last in first out | fresh: never used | kept: findable, longest unused first ]
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence


class BlockPool:
    """Reference-counted blocks 0 .. num_blocks - 1. A block is idle exactly when nobody holds it."""

    __slots__ = ("_blank", "_kept", "_num_fresh", "holds", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.holds = [0] * num_blocks
        """How often each block is held. Others read it; only the pool writes it."""
        self._num_fresh = num_blocks
        self._blank: list[int] = []
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        """Blocks that nobody holds."""
        return self._num_fresh + len(self._blank) + len(self._kept)

    @property
    def num_kept(self) -> int:
        """Idle blocks that are findable."""
        return len(self._kept)

    def idle_blocks(self) -> list[int]:
        """Every idle block, in the order in which `take` gives them out."""
        fresh = range(self.num_blocks - self._num_fresh, self.num_blocks)
        return [*reversed(self._blank), *fresh, *self._kept]

    def kept_blocks(self) -> list[int]:
        """The idle findable blocks, longest unused first."""
        return list(self._kept)

    def take(self) -> int:
        """Gives out one idle block, held once. What it held before is lost. Raises IndexError if none is idle."""
        if self._blank:
            block = self._blank.pop()
        elif self._num_fresh:
            block = self.num_blocks - self._num_fresh
            self._num_fresh -= 1
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
        else:
            raise IndexError(f"all {self.num_blocks} blocks are held")
        self.holds[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Holds a findable block once more, idle or not. Raises KeyError for an idle block that is not findable."""
        if self.holds[block] == 0:
            del self._kept[block]
        self.holds[block] += 1

    def release(self, block_ids: Sequence[int], findable: Container[int]) -> None:
        """Gives back one hold of each block of a table.

        The last block goes first, so that of a prefix the beginning is reused last. Blocks not in `findable` are blank.
        """
        holds = self.holds
        for block in reversed(block_ids):
            if holds[block] < 1:
                raise ValueError(f"block {block} is released but not held")
            holds[block] -= 1
            if holds[block] == 0:
                if block in findable:
                    self._kept[block] = None
                else:
                    self._blank.append(block)

    def make_blank(self, block: int) -> None:
        """Takes note that a block is not findable any more. Held ones become blank when they are released."""
        if self.holds[block] == 0:
            del self._kept[block]
            self._blank.append(block)
