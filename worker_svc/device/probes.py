"""Proofs before a worker on a GPU says that it is ready: a real kernel agrees with the reference, ranks can add up.

Knows the kernel API and the group; no model. What these find could not be known without launching something.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.api import AttentionSpec, Backend, KVCacheSpec, RaggedBatch, RopeTable
from kernels.reference import ReferenceBackend
from octavo.process import StartError
from worker_svc.device.api import Device
from worker_svc.parallel.group import TPGroup

_LOG = logging.getLogger(__name__)

# bf16 keeps eight bits; sums in another order differ in the last.
_TOLERANCE = 2e-2
_CONTEXT, _PROBED_ROWS = 300, 3


def prove_kernels(backend: Backend, spec: KVCacheSpec, num_heads: int, dtype: torch.dtype, place: torch.device) -> None:
    """One layer's attention of the model's own shape, written and read by the kernels, beside the reference's.

    Raises StartError naming the card and the error where they disagree, or where the kernels cannot be launched.
    """
    card = torch.cuda.get_device_name(place) if place.type == "cuda" else "the CPU"
    try:
        found = _attended(backend, spec, num_heads, dtype, place)
    except Exception as error:  # whatever a compiler, a driver or a card says
        raise StartError(
            f"the kernels cannot be launched on {card}: {type(error).__name__}: {error}; `octavo doctor` compares "
            "driver, CUDA and card. Triton needs a C compiler (gcc or clang) and Python's headers where it runs: "
            "install them, update driver and Triton, or give --device cpu"
        ) from error
    expected = _attended(ReferenceBackend(), spec, num_heads, dtype, torch.device("cpu"))
    error_share = float((found.cpu() - expected).norm() / expected.norm())
    if not error_share <= _TOLERANCE:  # NaN too
        raise StartError(
            f"attention on {card} is off by {error_share:.2g} of its size from the reference's, at most {_TOLERANCE:g} "
            "is rounding: the card computes wrongly or its compiler does. Try another card or Triton version, or give "
            "--device cpu"
        )
    _LOG.info("a kernel on %s agrees with the reference: error %.1e", card, error_share)


def _attended(backend: Backend, spec: KVCacheSpec, num_heads: int, dtype: torch.dtype, place: torch.device) -> Tensor:
    """Attention of a few tokens at the end of a context, fp32; the same inputs wherever it is computed."""
    generator = torch.Generator().manual_seed(0)
    num_blocks = -(-_CONTEXT // spec.block_size)
    small = KVCacheSpec(1, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim, spec.dtype)
    cache = backend.allocate_kv_cache(small)
    blocks = torch.randn(2, num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim, generator=generator)
    backend.import_blocks(cache, 0, range(num_blocks), blocks.to(spec.dtype).to(place))
    width = (num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    qkv = torch.randn(_PROBED_ROWS, width, generator=generator).to(dtype).to(place)
    angles = torch.arange(_CONTEXT)[:, None] * 0.5 ** torch.arange(spec.head_dim // 2)
    rope = RopeTable(angles.cos().to(place), angles.sin().to(place))
    positions = torch.arange(_CONTEXT - _PROBED_ROWS, _CONTEXT)
    batch = RaggedBatch(
        query_starts=torch.tensor([0, _PROBED_ROWS], dtype=torch.int32, device=place),
        context_lens=torch.tensor([_CONTEXT], dtype=torch.int32, device=place),
        block_tables=torch.arange(num_blocks, dtype=torch.int32, device=place)[None],
        positions=positions.int().to(place),
        num_rows=1,
        num_tokens=_PROBED_ROWS,
        max_query_len=_PROBED_ROWS,
        max_context_len=_CONTEXT,
    )
    plan = backend.plan_attention(batch, cache)
    backend.rope_write_kv(qkv, cache, 0, plan, rope, None)
    spec_of_layer = AttentionSpec(num_heads, spec.head_dim**-0.5)
    return backend.attention(qkv, cache, 0, plan, spec_of_layer).float()


@dataclass(frozen=True)
class ReduceRate:
    """What the ranks' sums were measured at: seconds of one small sum, and bytes a second of a large one."""

    latency_s: float
    bytes_per_s: float


def probe_all_reduce(group: TPGroup, device: Device, seconds: float = 1.0, num_bytes: int = 16 << 20) -> ReduceRate:
    """Adds up tensors for about a second, as every layer will; all ranks call it. Logged by rank 0.

    Raises StartError where a sum is wrong.
    """
    rates = {}
    for size in (8192, num_bytes):
        ones = torch.ones(size // 4, dtype=torch.float32, device=device.torch_device)
        total = group.all_reduce(ones.clone())
        if not bool((total == group.size).all()):
            raise StartError(
                f"rank {group.rank}: {group.size} ranks of ones add up to {float(total.min())}: cards that cannot "
                "reach each other's memory as they say. Set NCCL_P2P_DISABLE=1, and see `nvidia-smi topo -m`"
            )
        rates[size] = _seconds_of_sum(group, device, ones, seconds / 2)
    rate = ReduceRate(rates[8192], num_bytes / rates[num_bytes])
    if group.rank == 0:
        _LOG.info(
            "sums of %d ranks: %.0f us for 8 KiB, %.1f GB/s for %d MiB",
            group.size,
            1e6 * rate.latency_s,
            rate.bytes_per_s / 1e9,
            num_bytes >> 20,
        )
    return rate


def _seconds_of_sum(group: TPGroup, device: Device, values: Tensor, seconds: float) -> float:
    """As many sums as every rank finds to take so long."""

    def run(num_sums: int) -> float:
        device.mark().wait()
        begun = time.perf_counter()
        for _ in range(num_sums):
            group.all_reduce(values)
        device.mark().wait()
        return max(time.perf_counter() - begun, 1e-9) / num_sums

    first = run(3)
    (num_sums,) = group.minimum((max(1, min(10_000, int(seconds / first))),))
    return run(num_sums)
