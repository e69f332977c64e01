"""A plan's copies between the tiers, beside the steps, and which steps have to wait for them.

Copies run in the order of their plans, after every step launched before. A step waits for them when one of its rows
has a block that they read or write; others overlap. Knows blocks by number; must not know why they move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kernels.api import Backend, KVCache
from octavo.internal.v1 import worker_pb2
from worker_svc.device.api import Aside, Device
from worker_svc.rows import Int64Array, PlanError, RowTable


class BlockCopies:
    """Used by the step thread."""

    def __init__(
        self, device: Device, backend: Backend, rows: RowTable, cache: KVCache, host_cache: KVCache | None
    ) -> None:
        self._device, self._backend, self._rows = device, backend, rows
        self._cache, self._host_cache = cache, host_cache
        # Copies that no step has waited for, and the device blocks that they touch.
        self._last: Aside | None = None
        self._is_moving: npt.NDArray[np.bool_] = np.zeros(rows.limits.num_blocks, bool)

    def launch(self, plan: worker_pb2.StepPlan) -> Aside | None:
        """The plan's copies; None where it has none. Raises PlanError for blocks that there are not."""
        out = list(plan.demote_device_ids), list(plan.demote_host_ids)
        back = list(plan.promote_host_ids), list(plan.promote_device_ids)
        if not any((*out, *back)):
            return None
        host_cache = self._host_cache
        if host_cache is None:
            raise PlanError("the plan copies blocks between device and host, the worker has no host blocks")

        def work() -> None:
            self._backend.copy_blocks(self._cache, out[0], host_cache, out[1])
            self._backend.copy_blocks(host_cache, back[0], self._cache, back[1])

        try:
            self._last = self._device.beside(work)
        except ValueError as error:
            raise PlanError(f"the plan's block copies: {error}") from error
        self._is_moving[[*out[0], *back[1]]] = True
        return self._last

    def await_for(self, slots: Int64Array) -> None:
        """What is launched next, a step of these rows, comes after the copies that touch one of their blocks."""
        if self._last is None or not self._touch(slots):
            return
        self._device.follow(self._last)
        self._last = None
        self._is_moving[:] = False

    def _touch(self, slots: Sequence[int] | Int64Array) -> bool:
        rows = self._rows
        return any(self._is_moving[rows.block_tables[slot, : rows.num_blocks[slot]]].any() for slot in slots)
