"""What the attention tests of the interpreter share: steps, and how far from the fp64 oracle an output may be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kernel_steps import Geometry, Step, oracle
from torch import Tensor

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
# One token, a block's edge, a few blocks, over a partition's edge.
LENGTHS = (1, 16, 33, 270)
# Prompts in chunks beside decode rows, which end at and around the edges of blocks.
STEPS: tuple[Step, ...] = (
    [(0, 1), (1, 15), (3, 200)],
    [(1, 1), (2, 32), (3, 69)],
    [(3, 1), (2, 1)],
)
# What rounding an output of magnitude up to about 4 to the type may cost.
TOLERANCES = {FP32: 2e-5, FP16: 3e-3, BF16: 2.5e-2}


def assert_near_oracle(geometry: Geometry, sequences: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    for sequence, output in zip(sequences, outputs, strict=True):
        length = len(sequence)
        assert output.dtype == geometry.dtype
        errors = (output.double() - oracle(geometry, sequence)).abs().amax(-1)
        # A key next to a rounding border may be stored one unit of the cache's precision off, and some tokens see it.
        assert errors.max() < max(TOLERANCES[geometry.dtype], TOLERANCES.get(geometry.cache_dtype, 0.2)), length
        assert errors.median() < TOLERANCES[geometry.dtype], length
