"""What a worker proves before it says that it is ready on a GPU, over kernels and groups that do it wrong."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.api import KVCacheSpec
from kernels.reference import ReferenceBackend
from octavo.process import StartError
from worker_svc.device.cpu import CPU
from worker_svc.device.probes import probe_all_reduce, prove_kernels
from worker_svc.parallel.group import OneRank

SPEC = KVCacheSpec(4, 1000, 16, 2, 32, torch.bfloat16)
PLACE = torch.device("cpu")


class Wrong(ReferenceBackend):
    """Attention that is a little off."""

    def attention(self, *given: object) -> Tensor:
        return super().attention(*given) * 1.1  # type: ignore[arg-type]


class Dead(ReferenceBackend):
    """A card that launches nothing."""

    def rope_write_kv(self, *given: object) -> None:
        raise RuntimeError("no kernel image is available for execution on the device")


class TwoRanks(OneRank):
    """Seen from rank 0, the other one being alike; sums are scaled by `share`."""

    size = 2

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self.num_sums = 0

    def all_reduce(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return x * 2 * self.share


def test_right_kernels_pass() -> None:
    prove_kernels(ReferenceBackend(), SPEC, 8, torch.bfloat16, PLACE)


def test_wrong_kernels_stop_the_start() -> None:
    with pytest.raises(StartError, match=r"off by 0\.1 of its size from the reference"):
        prove_kernels(Wrong(), SPEC, 8, torch.bfloat16, PLACE)


def test_kernels_that_cannot_be_launched_stop_the_start() -> None:
    with pytest.raises(StartError, match=r"RuntimeError: no kernel image .* give --device cpu"):
        prove_kernels(Dead(), SPEC, 8, torch.bfloat16, PLACE)


def test_sums_are_timed_and_checked() -> None:
    group = TwoRanks()
    rate = probe_all_reduce(group, CPU, seconds=0.01, num_bytes=1 << 16)
    assert rate.latency_s > 0
    assert rate.bytes_per_s > 0
    assert group.num_sums > 8
    with pytest.raises(StartError, match=r"2 ranks of ones add up to 1\.0"):
        probe_all_reduce(TwoRanks(0.5), CPU, seconds=0.01)
