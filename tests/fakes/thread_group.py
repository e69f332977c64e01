"""A tensor-parallel group whose ranks are threads of one process: the slow twin of the one between processes.

Every operation is what `TPGroup` says, by exchanging references at a barrier. A rank that fails breaks the barrier, so
the others end too and the first failure is what the caller sees.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from worker_svc.parallel.group import ordered_sum

T = TypeVar("T")
_WAIT_S = 120.0


class _Exchange:
    """Where the ranks put down what they have and take what the others have."""

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=_WAIT_S)
        self.places: list[Tensor] = [torch.empty(0)] * num_ranks

    def swap(self, rank: int, own: Tensor) -> list[Tensor]:
        """Every rank's tensor; a copy, for its owner may write to it."""
        self.places[rank] = own
        self.barrier.wait()
        found = [place.clone() for place in self.places]
        self.barrier.wait()
        return found


class ThreadGroup:
    """One rank's end."""

    is_batch_invariant = True

    def __init__(self, exchange: _Exchange, rank: int) -> None:
        self.rank = rank
        self.size = exchange.barrier.parties
        self._exchange = exchange

    def all_reduce(self, x: Tensor) -> Tensor:
        return ordered_sum(torch.stack(self._exchange.swap(self.rank, x)))

    def gather_columns(self, x: Tensor) -> Tensor | None:
        parts = self._exchange.swap(self.rank, x)
        return torch.cat(parts, dim=1) if self.rank == 0 else None

    def broadcast(self, x: Tensor) -> Tensor:
        return x.copy_(self._exchange.swap(self.rank, x)[0])

    def minimum(self, numbers: Sequence[int]) -> tuple[int, ...]:
        found = self._exchange.swap(self.rank, torch.tensor(numbers, dtype=torch.int64))
        return tuple(torch.stack(found).amin(dim=0).tolist())


def on_ranks(num_ranks: int, run: Callable[[ThreadGroup], T]) -> list[T]:
    """What `run` returns on each of so many ranks. Raises what the first rank that failed raised."""
    exchange = _Exchange(num_ranks)

    def one(rank: int) -> T:
        try:
            return run(ThreadGroup(exchange, rank))
        except BaseException:
            exchange.barrier.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [pool.submit(one, rank) for rank in range(num_ranks)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
