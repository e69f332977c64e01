"""A step's small arrays on their way to the device in one copy, and its results on their way back in one.

Knows arrays and bytes; must not know what they say. Host memory is reused two steps later: whoever launches has at
most two steps in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from worker_svc.device.api import Device, Mark

STEPS_IN_FLIGHT = 2
_ALIGNMENT = 16
_SMALLEST_BYTES = 4096

Array = npt.NDArray[np.generic]


class Uploads:
    """Copies of host arrays to the device, one launch for each `upload`, in one of two host buffers by turns."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = [device.host_buffer(_SMALLEST_BYTES) for _ in range(STEPS_IN_FLIGHT)]
        self._turn = 0
        self._used_bytes = 0

    def begin_step(self) -> None:
        """The step before the last has been computed: its buffer is free."""
        self._turn = (self._turn + 1) % STEPS_IN_FLIGHT
        self._used_bytes = 0

    def upload(self, arrays: Sequence[Array], into: Tensor | None = None) -> list[Tensor]:
        """The arrays as device tensors of their shapes and dtypes, slices of one allocation, or of `into` (uint8)."""
        offsets, num_bytes = _layout(arrays)
        host = self._room(num_bytes)
        for array, offset in zip(arrays, offsets, strict=True):
            host[offset : offset + array.nbytes].numpy()[:] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        if into is None:
            into = torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)
        into[:num_bytes].copy_(host, non_blocking=True)
        return [
            into[offset : offset + array.nbytes].view(_TORCH_DTYPES[array.dtype.name]).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=True)
        ]

    def _room(self, num_bytes: int) -> Tensor:
        begin, end = self._used_bytes, self._used_bytes + num_bytes
        buffer = self._buffers[self._turn]
        if end > len(buffer):
            # Copies in flight keep what they read: torch holds pinned memory until they are done.
            buffer = self._buffers[self._turn] = self._device.host_buffer(2 * end)
        self._used_bytes = end
        return buffer[begin:end]


class Fetched:
    """Results of one step, on their way to the host since this was made."""

    def __init__(self, device: Device, tensors: Sequence[Tensor], host: Tensor) -> None:
        """`host` has room for all of them and stays untouched until they have been read."""
        # By falling size of their items, so that each begins aligned.
        order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
        flat = [tensors[index].contiguous().reshape(-1).view(torch.uint8) for index in order]
        num_bytes = sum(len(part) for part in flat)
        host[:num_bytes].copy_(torch.cat(flat), non_blocking=True)
        self._host = host[:num_bytes]
        self._shapes = [(order.index(index), x.shape, x.dtype) for index, x in enumerate(tensors)]
        self._sizes = [len(part) for part in flat]
        self._mark = device.mark()

    @property
    def mark(self) -> Mark:
        """When they have arrived."""
        return self._mark

    def read(self) -> list[Array]:
        """Waits for them; copies, in the order in which they were given."""
        self._mark.wait()
        starts = np.cumsum([0, *self._sizes])
        found = []
        for place, shape, dtype in self._shapes:
            part = self._host[int(starts[place]) : int(starts[place + 1])]
            found.append(part.view(dtype).view(shape).numpy().copy())
        return found


class Arrived:
    """Results that were computed in the host's own memory."""

    def __init__(self, device: Device, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._mark = device.mark()

    @property
    def mark(self) -> Mark:
        """When they were computed."""
        return self._mark

    def read(self) -> list[Array]:
        """The tensors themselves, as arrays."""
        self._mark.wait()
        return [tensor.numpy() for tensor in self._tensors]


class Downloads:
    """Results on their way: copied to one of two host buffers by turns, or there already."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers = [device.host_buffer(_SMALLEST_BYTES) for _ in range(STEPS_IN_FLIGHT)]
        self._turn = 0

    def fetch(self, tensors: Sequence[Tensor]) -> Fetched | Arrived:
        """Launches the copy of one step's results; those of the step before the last must have been read."""
        if not self._device.runs_ahead:
            return Arrived(self._device, tensors)
        self._turn = (self._turn + 1) % STEPS_IN_FLIGHT
        num_bytes = sum(x.numel() * x.element_size() for x in tensors)
        if num_bytes > len(self._buffers[self._turn]):
            self._buffers[self._turn] = self._device.host_buffer(2 * num_bytes)
        return Fetched(self._device, tensors, self._buffers[self._turn])


def _layout(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array begins, aligned, and the bytes of all."""
    offsets, end = [], 0
    for array in arrays:
        offsets.append(end)
        end += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


_TORCH_DTYPES = {
    "bool": torch.bool,
    "int32": torch.int32,
    "int64": torch.int64,
    "float32": torch.float32,
}
