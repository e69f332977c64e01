"""The group over torch.distributed: gloo between CPUs, NCCL between GPUs.

Uses collectives on tensors alone: torch's collectives on objects pickle, and nothing here is ever unpickled. Knows
tensors and a process group; how its ranks found each other is `rendezvous.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from worker_svc.parallel.group import ordered_sum


class TorchGroup:
    """One rank's end of a process group.

    `is_ordered`: sums are gathered and added in the order of the ranks. Without it they are the library's all-reduce,
    which moves less, and whose order of addition depends on the tensor's size from three ranks on.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, *, is_ordered: bool) -> None:
        self.rank = group.rank()
        self.size = group.size()
        # Two numbers have one sum, whichever comes first.
        self.is_batch_invariant = is_ordered or self.size == 2
        self._group = group
        self._device = device
        self._is_ordered = is_ordered

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._is_ordered:
            return ordered_sum(self._all_gather(x))
        dist.all_reduce(x, group=self._group)
        return x

    def gather_columns(self, x: Tensor) -> Tensor | None:
        x = x.contiguous()
        if self.rank:
            dist.gather(x, None, group_dst=0, group=self._group)
            return None
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.gather(x, parts, group_dst=0, group=self._group)
        return torch.cat(parts, dim=1)

    def broadcast(self, x: Tensor) -> Tensor:
        dist.broadcast(x, group_src=0, group=self._group)
        return x

    def minimum(self, numbers: Sequence[int]) -> tuple[int, ...]:
        # One number more: of none the libraries make nothing, and nobody would wait.
        least = torch.tensor((0, *numbers), dtype=torch.int64, device=self._device)
        dist.all_reduce(least, dist.ReduceOp.MIN, group=self._group)
        return tuple(least.tolist()[1:])

    def _all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, [size, *x.shape]."""
        gathered = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(gathered.unbind(0)), x.contiguous(), group=self._group)
        return gathered
