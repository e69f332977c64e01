"""The rotary table: cosines and sines of every position, computed once at load.

Knows RopeConfig. Angles are rounded to fp32 where checkpoints were trained with fp32 (frequency and product), the
cosine itself is taken in fp64: the table then depends neither on thread count nor on where a vector loop ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from kernels.api import RopeTable
from worker_svc.model.config import LinearScaling, Llama3Scaling, RopeConfig


def rope_table(rope: RopeConfig, num_positions: int) -> RopeTable:
    """Cosines and sines [num_positions, rotary_dim / 2], fp32."""
    positions = np.arange(num_positions, dtype=np.float32)
    angles = (positions[:, None] * inverse_frequencies(rope)[None, :]).astype(np.float64)
    return RopeTable(
        cos=torch.from_numpy(np.cos(angles).astype(np.float32)),
        sin=torch.from_numpy(np.sin(angles).astype(np.float32)),
    )


def inverse_frequencies(rope: RopeConfig) -> npt.NDArray[np.float32]:
    """Radians per position of each pair of dimensions, [rotary_dim / 2]: theta ** (-2i / rotary_dim), then scaled."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    frequencies = rope.theta**-exponents
    match rope.scaling:
        case None:
            scaled = frequencies
        case LinearScaling(factor):
            scaled = frequencies / factor
        case Llama3Scaling():
            scaled = _llama3(frequencies, rope.scaling)
    return scaled.astype(np.float32)


def _llama3(frequencies: npt.NDArray[np.float64], scaling: Llama3Scaling) -> npt.NDArray[np.float64]:
    """Llama 3.1's scaling: by how many turns a pair makes within the original context.

    Fewer than `low_freq_factor` turns: divided by `factor`. More than `high_freq_factor`: kept. Linear between.
    """
    turns = scaling.original_max_positions * frequencies / (2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor
