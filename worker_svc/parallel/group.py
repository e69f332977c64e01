"""What the ranks of a replica do together on tensors: sum, gather, agree. Knows tensors; no processes and no model.

Every rank calls the same operations in the same order; a rank that stays away makes the others wait. `OneRank` is the
group of a replica that is one process: every operation is the identity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class TPGroup(Protocol):
    """The ranks that hold one model together, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's sum is bitwise the same however many rows there are."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x` of one shape, on every rank; `x` may be overwritten.

        Where `is_batch_invariant`: added in fp32 in the order of the ranks, and rounded once to x's dtype.
        """
        ...

    def gather_columns(self, x: Tensor) -> Tensor | None:
        """On rank 0 all ranks' [rows, columns] side by side, [rows, size * columns]; None elsewhere."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's `x`, on every rank; written into the given one, which has its shape and dtype."""
        ...

    def minimum(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The least of each number over the ranks. Waits for all of them."""
        ...


class OneRank:
    """A replica that is one process."""

    rank = 0
    size = 1
    is_batch_invariant = True

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def gather_columns(self, x: Tensor) -> Tensor | None:
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        return x

    def minimum(self, numbers: Sequence[int]) -> tuple[int, ...]:
        return tuple(numbers)


@dataclass(frozen=True)
class Membership:
    """One rank's place in its replica: the group, and how many of its ranks share this machine."""

    group: TPGroup
    num_local_ranks: int
    local_rank: int = 0


ALONE = Membership(OneRank(), 1)
"""A replica that is one process."""


def ordered_sum(parts: Tensor) -> Tensor:
    """The sum over the first dimension of [ranks, ...], added in fp32 in order and rounded once.

    No element's sum depends on where it stands or on what is beside it, so no row's does on the batch.
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)
