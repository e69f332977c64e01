"""One replica's KV memory: block tables of its sequences over the pools and prefix caches of both tiers.

Writes block_ids, num_hashed_blocks, num_foreign_blocks and chain of sequences; must not know slots, steps or queues. A
sequence gets blocks for all its known tokens when it is admitted, and one more whenever it grows over a block's edge.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.host_tier import NO_COPIES, Copies, HostTier
from scheduler_svc.core.limits import PreemptionMode
from scheduler_svc.core.prefix_cache import PrefixCache, PrefixChain
from scheduler_svc.core.sequence import Sequence

_LOOK_AHEAD = 32
"""Blocks that are hashed at once while a prefix is looked up; those after its end are needed soon."""


_PROBE_EVERY = 256


@dataclass(frozen=True, slots=True)
class Prefix:
    """The longest run of findable blocks that begins a sequence."""

    device: list[int] = field(default_factory=list)
    """Those on the device, in order."""
    host: dict[int, int] = field(default_factory=dict)
    """Those in host memory alone: number in the sequence -> host block."""

    @property
    def num_blocks(self) -> int:
        """Length of the run."""
        return len(self.device) + len(self.host)


class KvSpace:
    """Blocks of one replica."""

    __slots__ = (
        "_demotable",
        "_num_skipped",
        "block_size",
        "cache",
        "caching",
        "copies_pay",
        "fingerprint",
        "host",
        "pool",
        "tenants_share",
    )

    def __init__(
        self,
        fingerprint: str,
        block_size: int,
        num_blocks: int,
        caching: bool,
        num_host_blocks: int = 0,
        *,
        tenants_share: bool = False,
    ) -> None:
        self.fingerprint = fingerprint
        self.tenants_share = tenants_share
        self.block_size = block_size
        self.caching = caching
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache()
        self.host = HostTier(num_host_blocks) if num_host_blocks and caching else None
        self.copies_pay = True
        """Whether copying a block to the host and back takes less time than computing it again (replica)."""
        self._num_skipped = 0  # demotions left out because they do not pay
        self._demotable = [True] * num_blocks  # False: what an idle block holds is cheaper to compute again

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def num_usable_blocks(self, sequence: Sequence) -> int:
        """Full blocks at its beginning that it may share.

        At least one token is left to compute, and so is every position whose output a wanted prompt logprob needs: the
        logprob of position p comes from computing p - 1.
        """
        if not self.caching:
            return 0
        num_usable = len(sequence.token_ids) - 1
        start = sequence.request.prompt_logprobs_start
        if start is not None:
            num_usable = min(num_usable, max(0, start - 1))
        return num_usable // self.block_size

    def first_digest(self, sequence: Sequence) -> bytes | None:
        """Digest of its first block, if it may share that one."""
        if self.num_usable_blocks(sequence) == 0:
            return None
        return self.chain_of(sequence).digest(sequence.token_ids, 0)

    def has(self, digest: bytes) -> bool:
        """Whether a block is findable by this digest, on either tier."""
        return self.cache.find(digest) is not None or (self.host is not None and self.host.find(digest) is not None)

    def is_like(self, other: KvSpace) -> bool:
        """Whether the other names the same tokens by the same digests."""
        same_size = self.block_size == other.block_size and self.caching == other.caching
        return same_size and self.fingerprint == other.fingerprint

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """The longest run of findable blocks that begins the sequence and may be shared."""
        prefix = Prefix()
        num_usable = self.num_usable_blocks(sequence)
        if num_usable == 0:
            return prefix
        chain, token_ids, device, host = self.chain_of(sequence), sequence.token_ids, prefix.device, self.host
        find, digests = self.cache.find, chain.digests
        for index in range(num_usable):
            if index == len(digests):
                chain.extend(token_ids, min(num_usable, index + _LOOK_AHEAD))
            digest = digests[index]
            block = find(digest)
            if block is not None:
                device.append(block)
                continue
            host_block = host.find(digest) if host is not None and self.copies_pay else None
            if host_block is None:
                break
            prefix.host[index] = host_block
        return prefix

    def num_missing_blocks(self, sequence: Sequence, prefix: Prefix) -> int:
        """Blocks that must become idle before `admit` succeeds; at most 0 if it would now."""
        holds = self.pool.holds
        num_idle_hits = sum(1 for block in prefix.device if holds[block] == 0)
        num_new = self.num_blocks_for(len(sequence.token_ids)) - len(prefix.device)
        return num_new + num_idle_hits - self.pool.num_idle

    def admit(self, sequence: Sequence, prefix: Prefix) -> None:
        """Gives the sequence a table for its known tokens that begins with `prefix`, just found.

        Raises IndexError, after the caller failed to ask `num_missing_blocks`, if the blocks do not suffice.
        """
        if self.num_missing_blocks(sequence, prefix) > 0:
            raise IndexError(f"sequence {sequence.sequence_id} needs more blocks than are idle")
        for block in prefix.device:
            self._hold(block)
        num_found = prefix.num_blocks
        num_new = self.num_blocks_for(len(sequence.token_ids)) - num_found
        found = self._promote(sequence, prefix) if prefix.host else prefix.device
        sequence.block_ids = found + [self._take() for _ in range(num_new)]
        sequence.num_hashed_blocks = num_found
        if sequence.num_foreign_blocks is None:
            sequence.num_foreign_blocks = num_found

    def _promote(self, sequence: Sequence, prefix: Prefix) -> list[int]:
        """Device blocks for the whole prefix; those from the host are filled and findable when their plan is done, as
        is all that comes after it."""
        host, chain, device = self.host, self.chain_of(sequence), iter(prefix.device)
        assert host is not None, "what was found in the host tier is there"
        for block in prefix.host.values():
            host.hold(block)
        found = []
        for index in range(prefix.num_blocks):
            host_block = prefix.host.get(index)
            if host_block is None:
                found.append(next(device))
                continue
            block = self._take()
            host.promote(host_block, block)
            self.cache.add(chain.digest(sequence.token_ids, index), block)
            found.append(block)
        return found

    def take_copies(self) -> Copies:
        """The copies that the plan now made must do."""
        return self.host.take_copies() if self.host is not None else NO_COPIES

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
        chain = self.chain_of(sequence)
        for index in range(sequence.num_hashed_blocks, num_full):
            self.cache.add(chain.digest(sequence.token_ids, index), sequence.block_ids[index])
        sequence.num_hashed_blocks = num_full

    def release(self, sequence: Sequence) -> None:
        """Takes the table away."""
        self.pool.release(sequence.block_ids, self.cache.blocks)
        sequence.block_ids = []
        sequence.num_hashed_blocks = 0

    def mark(self, block_ids: Iterable[int], mode: PreemptionMode) -> None:
        """Whether those of the blocks that are idle are worth a copy to the host when they are given out anew."""
        holds, worth = self.pool.holds, mode is not PreemptionMode.RECOMPUTE
        for block in block_ids:
            if holds[block] == 0:
                self._demotable[block] = worth

    def forget_own(self, sequence: Sequence) -> None:
        """Makes unfindable what the sequence computed itself, for its numbers are not to be trusted."""
        if sequence.chain is None:
            return
        for digest in self.chain_of(sequence).digests[sequence.num_foreign_blocks or 0 :]:
            block = self.cache.find(digest)
            if block is not None:
                self._forget(block)
            if self.host is not None:
                self.host.forget(digest)

    def forget_idle(self) -> int:
        """Makes unfindable every block that no sequence holds, in both tiers; returns how many."""
        kept = self.pool.kept_blocks()
        for block in kept:
            self._forget(block)
        return len(kept) + (self.host.forget_all() if self.host is not None else 0)

    def chain_of(self, sequence: Sequence) -> PrefixChain:
        """Hashes of its full blocks as this memory names them."""
        chain = sequence.chain
        while chain is not None and (chain.fingerprint != self.fingerprint or chain.block_size != self.block_size):
            chain = chain.other
        if chain is None:
            request = sequence.request
            tenant = "" if self.tenants_share else request.tenant
            names = (request.adapter, tenant, request.cache_salt)
            known = (request.block_names or {}).get((self.fingerprint, self.block_size), ())
            chain = PrefixChain(self.fingerprint, self.block_size, names, known)
            chain.other, sequence.chain = sequence.chain, chain
        return chain

    def _forget(self, block: int) -> None:
        self.cache.forget(block)
        self.pool.make_blank(block)

    def _hold(self, block: int) -> None:
        self.pool.hold(block)
        self._demotable[block] = True

    def _take(self) -> int:
        block = self.pool.take()
        digest = self.cache.digest_of(block)
        if digest is not None:
            if self.host is not None and self._demotable[block] and self._is_worth_copying():
                self.host.demote(digest, block)
            self.cache.forget(block)
        self._demotable[block] = True
        return block

    def _is_worth_copying(self) -> bool:
        """While copies do not pay one in `_PROBE_EVERY` is made all the same, so that it is noticed when they do."""
        if self.copies_pay:
            return True
        self._num_skipped += 1
        return self._num_skipped % _PROBE_EVERY == 0
