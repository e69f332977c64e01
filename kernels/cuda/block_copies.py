"""Copies of KV blocks between device and pinned host memory in one launch of few thread blocks.

Knows tensors laid out as planes of blocks; knows no tiers and no sequences. Optional: `open_block_copier` says why not,
and what copies otherwise is the Triton kernel in kernels/triton/cache.py, which takes all of the device.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from kernels.cuda.compiler import CudaUnavailable, compile_cubin
from kernels.cuda.driver import Kernel

SOURCE = "copy_blocks.cu"
# The copy's unit, and the launch: enough loads in flight to fill the link, on a small part of the device.
UNIT_BYTES = 16
_THREAD_BLOCKS = 24
_THREADS = 256

_log = logging.getLogger(__name__)


class BlockCopier:
    """Launches the copies of one device."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def copy(self, src: Tensor, dst: Tensor, pairs: Tensor) -> None:
        """src and dst are [planes, blocks, bytes] uint8; `pairs` [2, n] int64 on the device: blocks read, written.

        No block may be both. Queued on the current stream. Raises ValueError for shapes that do not fit.
        """
        self._kernel.launch(_THREAD_BLOCKS, _THREADS, launch_arguments(src, dst, pairs))


def launch_arguments(src: Tensor, dst: Tensor, pairs: Tensor) -> tuple[int, ...]:
    """The kernel's arguments; raises ValueError for tensors that are no planes of blocks of one size."""
    block_bytes = src.shape[2]
    if src.shape[0] != dst.shape[0] or dst.shape[2] != block_bytes or block_bytes % UNIT_BYTES:
        raise ValueError(
            f"blocks of {tuple(src.shape)} and {tuple(dst.shape)} bytes: [planes, blocks, bytes] must agree in planes "
            f"and bytes, a multiple of {UNIT_BYTES}"
        )
    if not (src.is_contiguous() and dst.is_contiguous() and pairs.is_contiguous()) or pairs.dtype != torch.int64:
        raise ValueError("blocks and pairs must be contiguous, pairs int64")
    units = block_bytes // UNIT_BYTES
    return (
        src.data_ptr(),
        dst.data_ptr(),
        pairs.data_ptr(),
        pairs.shape[1],
        src.shape[0],
        src.shape[1] * units,
        dst.shape[1] * units,
        units,
    )


@functools.cache
def open_block_copier(device: torch.device) -> BlockCopier | None:
    """The copier of a CUDA device, compiled and tried on it; None where there cannot be one, and the log says why."""
    try:
        major, minor = torch.cuda.get_device_capability(device)
        with torch.cuda.device(device):
            copier = BlockCopier(Kernel(compile_cubin(SOURCE, 10 * major + minor), "copy_blocks"))
            _try(copier, device)
    except (CudaUnavailable, OSError, RuntimeError) as error:
        _log.info("blocks are copied between the tiers by the Triton kernel, the CUDA one cannot be had: %s", error)
        return None
    _log.info(
        "blocks are copied between the tiers by a CUDA kernel on %d thread blocks, tried on %s", _THREAD_BLOCKS, device
    )
    return copier


def _try(copier: BlockCopier, device: torch.device) -> None:
    """Out and back again. Raises CudaUnavailable when other bytes arrive."""
    blocks = torch.randint(0, 256, (2, 4, 16 * 1021), dtype=torch.uint8, device=device)
    on_host = torch.zeros((2, 3, 16 * 1021), dtype=torch.uint8, pin_memory=True)
    returned = torch.zeros_like(blocks)
    copier.copy(blocks, on_host, torch.tensor([[3, 1], [0, 2]], device=device))
    copier.copy(on_host, returned, torch.tensor([[0, 2], [1, 0]], device=device))
    torch.cuda.current_stream().synchronize()
    if not torch.equal(returned[:, [1, 0]], blocks[:, [3, 1]]):
        raise CudaUnavailable("blocks copied to the host and back are not what they were")
