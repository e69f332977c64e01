"""Which full blocks hold which tokens: chains of hashes, and an index from hash to block.

Knows tokens and block numbers; must not know who holds a block or which one is given out next. A hash covers its
block's tokens and, through its parent, all before them and the root: model, adapter, tenant and salt. It is the same
in every process and on every machine. BLAKE2b with 256 bits is collision resistant, so equal hashes are taken for
equal tokens.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, KeysView, Sequence
from hashlib import blake2b

_DIGEST_BYTES = 32


def root_digest(*names: str) -> bytes:
    """Digest of the names that keep caches apart. Lengths are hashed too: ("ab", "c") differs from ("a", "bc")."""
    state = blake2b(digest_size=_DIGEST_BYTES)
    for name in names:
        data = name.encode("utf-8", "surrogatepass")
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


class PrefixChain:
    """Hashes of one sequence's full blocks, made when first asked for and never twice."""

    __slots__ = ("block_size", "digests", "fingerprint", "known", "other", "root")

    def __init__(self, fingerprint: str, block_size: int, names: Iterable[str], known: Sequence[bytes] = ()) -> None:
        """`known`: digests of the first blocks, where they are known and the tokens are not."""
        self.fingerprint = fingerprint
        self.block_size = block_size
        self.root = root_digest(fingerprint, str(block_size), *names)
        self.known = known
        self.digests: list[bytes] = []
        """Those made so far, by block."""
        self.other: PrefixChain | None = None
        """The same sequence's for replicas of another kind (KV space)."""

    def digest(self, token_ids: array[int], index: int) -> bytes:
        """Digest of block `index`, which must be full. `token_ids` are the sequence's; known ones never change."""
        if index >= len(self.digests):
            self.extend(token_ids, index + 1)
        return self.digests[index]

    def extend(self, token_ids: array[int], num_blocks: int) -> None:
        """Makes the digests of so many blocks. Raises IndexError, naming the block, if one of them is not full."""
        digests, size = self.digests, self.block_size
        if len(digests) < len(self.known):
            digests.extend(self.known[len(digests) : num_blocks])
        first = len(digests)
        if num_blocks * size > len(token_ids):
            block = max(first, len(token_ids) // size)
            raise IndexError(f"block {block} is not full: {len(token_ids)} tokens of {size} a block")
        tokens = token_ids[first * size : num_blocks * size]
        if sys.byteorder == "big":
            tokens.byteswap()
        data, step = tokens.tobytes(), size * tokens.itemsize
        parent = digests[-1] if digests else self.root
        for start in range(0, len(data), step):
            parent = blake2b(parent + data[start : start + step], digest_size=_DIGEST_BYTES).digest()
            digests.append(parent)


class PrefixCache:
    """One memory's findable blocks. A block has at most one digest and a digest at most one block."""

    __slots__ = ("_block_of", "_digest_of")

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._digest_of: dict[int, bytes] = {}

    @property
    def blocks(self) -> KeysView[int]:
        """The findable blocks."""
        return self._digest_of.keys()

    def find(self, digest: bytes) -> int | None:
        """The block that holds these tokens after these, if any."""
        return self._block_of.get(digest)

    def digest_of(self, block: int) -> bytes | None:
        """What a block is findable by, if anything."""
        return self._digest_of.get(block)

    def add(self, digest: bytes, block: int) -> None:
        """Makes a block findable. If another holds the same tokens already, that one stays and this one is not."""
        if digest in self._block_of:
            return
        if block in self._digest_of:
            raise ValueError(f"block {block} is findable by another digest; a full block never changes")
        self._block_of[digest] = block
        self._digest_of[block] = digest

    def forget(self, block: int) -> None:
        """Makes a block unfindable; nothing happens if it was."""
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
