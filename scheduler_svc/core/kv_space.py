"""One replica's KV memory: block tables of its sequences over the pool and the prefix cache.

Writes block_ids, num_hashed_blocks, num_foreign_blocks and chain of sequences; must not know slots, steps or queues. A
sequence gets blocks for all its known tokens when it is admitted, and one more whenever it grows over a block's edge.
One tier now; a host tier would live beside `pool` here.
"""

from __future__ import annotations

from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.prefix_cache import PrefixCache, PrefixChain
from scheduler_svc.core.sequence import Sequence


class KvSpace:
    """Blocks of one replica."""

    __slots__ = ("block_size", "cache", "caching", "fingerprint", "pool")

    def __init__(self, fingerprint: str, block_size: int, num_blocks: int, caching: bool) -> None:
        self.fingerprint = fingerprint
        self.block_size = block_size
        self.caching = caching
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache()

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The longest run of findable blocks that begins the sequence.

        At least one token is left to compute, and so is every position whose output a wanted prompt logprob needs: the
        logprob of position p comes from computing p - 1.
        """
        if not self.caching:
            return []
        num_usable = len(sequence.token_ids) - 1
        start = sequence.request.prompt_logprobs_start
        if start is not None:
            num_usable = min(num_usable, max(0, start - 1))
        chain, found = self._chain_of(sequence), []
        for index in range(num_usable // self.block_size):
            block = self.cache.find(chain.digest(sequence.token_ids, index))
            if block is None:
                break
            found.append(block)
        return found

    def num_missing_blocks(self, sequence: Sequence, prefix: list[int]) -> int:
        """Blocks that must become idle before `admit` succeeds; at most 0 if it would now."""
        holds = self.pool.holds
        num_idle_hits = sum(1 for block in prefix if holds[block] == 0)
        num_new = self.num_blocks_for(len(sequence.token_ids)) - len(prefix)
        return num_new + num_idle_hits - self.pool.num_idle

    def admit(self, sequence: Sequence, prefix: list[int]) -> None:
        """Gives the sequence a table for its known tokens that begins with `prefix`, just found.

        Raises IndexError, after the caller failed to ask `num_missing_blocks`, if the blocks do not suffice.
        """
        if self.num_missing_blocks(sequence, prefix) > 0:
            raise IndexError(f"sequence {sequence.sequence_id} needs more blocks than are idle")
        for block in prefix:
            self.pool.hold(block)
        num_new = self.num_blocks_for(len(sequence.token_ids)) - len(prefix)
        sequence.block_ids = prefix + [self._take() for _ in range(num_new)]
        sequence.num_hashed_blocks = len(prefix)
        if sequence.num_foreign_blocks is None:
            sequence.num_foreign_blocks = len(prefix)

    def grow(self, sequence: Sequence) -> int | None:
        """Appends one block to the table and returns it; None, changing nothing, if none is idle."""
        if self.pool.num_idle == 0:
            return None
        block = self._take()
        sequence.block_ids.append(block)
        return block

    def commit(self, sequence: Sequence, num_computed_tokens: int) -> None:
        """Makes the full blocks among the computed tokens findable. Their tokens must be known and answered for."""
        num_full = num_computed_tokens // self.block_size
        if not self.caching or num_full <= sequence.num_hashed_blocks:
            return
        chain = self._chain_of(sequence)
        for index in range(sequence.num_hashed_blocks, num_full):
            self.cache.add(chain.digest(sequence.token_ids, index), sequence.block_ids[index])
        sequence.num_hashed_blocks = num_full

    def release(self, sequence: Sequence) -> int:
        """Takes the table away; returns how many blocks it had."""
        block_ids = sequence.block_ids
        self.pool.release(block_ids, self.cache.blocks)
        sequence.block_ids = []
        sequence.num_hashed_blocks = 0
        return len(block_ids)

    def forget_own(self, sequence: Sequence) -> None:
        """Makes unfindable what the sequence computed itself, for its numbers are not to be trusted."""
        if sequence.chain is None:
            return
        for digest in sequence.chain.digests[sequence.num_foreign_blocks or 0 :]:
            block = self.cache.find(digest)
            if block is not None:
                self._forget(block)

    def forget_idle(self) -> int:
        """Makes unfindable every block that no sequence holds; returns how many."""
        kept = self.pool.kept_blocks()
        for block in kept:
            self._forget(block)
        return len(kept)

    def _forget(self, block: int) -> None:
        self.cache.forget(block)
        self.pool.make_blank(block)

    def _take(self) -> int:
        block = self.pool.take()
        self.cache.forget(block)
        return block

    def _chain_of(self, sequence: Sequence) -> PrefixChain:
        chain = sequence.chain
        if chain is None or chain.fingerprint != self.fingerprint or chain.block_size != self.block_size:
            request = sequence.request
            names = (request.adapter, request.tenant, request.cache_salt)
            chain = sequence.chain = PrefixChain(self.fingerprint, self.block_size, names)
        return chain
