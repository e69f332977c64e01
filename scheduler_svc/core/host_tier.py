"""The second tier: findable blocks in host memory, and the copies between the tiers that the next plan takes along.

Knows blocks of both memories and digests; must not know sequences. A findable device block that is given out anew is
demoted where its owner thinks that worth it: copied here first, unless its tokens are here already. A block that is
about to be promoted is held, so that no demotion of the same plan lands on it: a plan's demotions go before its
promotions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from scheduler_svc.core.blocks import BlockPool
from scheduler_svc.core.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Copies:
    """Copies of one plan; ids of the same place belong together."""

    demote_device_ids: list[int] = field(default_factory=list)
    demote_host_ids: list[int] = field(default_factory=list)
    promote_host_ids: list[int] = field(default_factory=list)
    promote_device_ids: list[int] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Copies in both directions."""
        return len(self.demote_host_ids) + len(self.promote_host_ids)


NO_COPIES = Copies()


class HostTier:
    """Blocks in host memory. All are idle, or held for a promotion that no plan has taken yet."""

    __slots__ = ("_demotions", "_promotions", "cache", "num_demoted", "num_promoted", "pool")

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache()
        self.num_demoted = 0
        self.num_promoted = 0
        self._demotions: dict[int, int] = {}  # host block -> device block; the latest counts, for it is copied last
        self._promotions: list[tuple[int, int]] = []  # (host block, device block)

    def find(self, digest: bytes) -> int | None:
        """The block that holds what this digest names, if any."""
        return self.cache.find(digest)

    def demote(self, digest: bytes, device_block: int) -> None:
        """A findable device block is about to be overwritten."""
        block = self.cache.find(digest)
        if block is None:
            if self.pool.num_idle == 0:
                return  # every block waits for its promotion in this very plan
            block = self.pool.take()
            self.cache.forget(block)
            self.cache.add(digest, block)
            self._demotions[block] = device_block
        else:
            self.pool.hold(block)
        self._let_go(block)

    def hold(self, block: int) -> None:
        """A block is about to be promoted."""
        self.pool.hold(block)

    def promote(self, block: int, device_block: int) -> None:
        """A held block is to be copied to the device."""
        self._promotions.append((block, device_block))

    def forget(self, digest: bytes) -> None:
        """Makes unfindable what this digest names."""
        block = self.cache.find(digest)
        if block is not None:
            self.cache.forget(block)
            self.pool.make_blank(block)
            self._demotions.pop(block, None)

    def forget_all(self) -> int:
        """Makes every block unfindable; returns how many were findable."""
        digests = [self.cache.digest_of(block) for block in list(self.cache.blocks)]
        for digest in digests:
            if digest is not None:
                self.forget(digest)
        return len(digests)

    def take_copies(self) -> Copies:
        """The copies that the plan now made must do; nothing is held for them any more."""
        if not self._demotions and not self._promotions:
            return NO_COPIES
        copies = Copies(
            list(self._demotions.values()),
            list(self._demotions),
            [block for block, _ in self._promotions],
            [device_block for _, device_block in self._promotions],
        )
        self.num_demoted += len(copies.demote_host_ids)
        self.num_promoted += len(copies.promote_host_ids)
        self._demotions = {}
        self._promotions = []
        for block in copies.promote_host_ids:
            self._let_go(block)
        return copies

    def held_blocks(self) -> list[int]:
        """Blocks that wait for their promotion, as often as they do."""
        return [block for block, _ in self._promotions]

    def pending_demotions(self) -> set[int]:
        """Host blocks that the next plan fills."""
        return set(self._demotions)

    def _let_go(self, block: int) -> None:
        self.pool.release([block], self.cache.blocks)
