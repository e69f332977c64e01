"""The rotary table: cosines and sines of every position, computed once at load.

Knows RopeConfig. Angles are rounded to fp32 where checkpoints were trained with fp32 (frequency and product), the
cosine itself is taken in fp64: the table then depends neither on thread count nor on where a vector loop ends.

Scalings that depend on a length (dynamic, LongRoPE) follow the longest sequence the worker is configured for, not the
one at hand: a key is cached once, and a sequence that grows past the original length would otherwise need every key
it has written turned anew, and would not share a prefix with a shorter one.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

from kernels.api import RopeTable
from worker_svc.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
)

# Bounds the scratch memory of a long table.
_POSITIONS_AT_ONCE = 4096

Frequencies = npt.NDArray[np.float64]


def rope_table(rope: RopeConfig, num_positions: int) -> RopeTable:
    """Cosines and sines [num_positions, rotary_dim / 2], fp32; `num_positions` is the longest sequence."""
    frequencies = inverse_frequencies(rope, num_positions).astype(np.float32)
    factor = _attention_factor(rope)
    cos = np.empty((num_positions, len(frequencies)), dtype=np.float32)
    sin = np.empty_like(cos)
    for start in range(0, num_positions, _POSITIONS_AT_ONCE):
        rows = slice(start, min(start + _POSITIONS_AT_ONCE, num_positions))
        positions = np.arange(rows.start, rows.stop, dtype=np.float32)
        angles = (positions[:, None] * frequencies[None, :]).astype(np.float64)
        cos[rows], sin[rows] = np.cos(angles) * factor, np.sin(angles) * factor
    return RopeTable(cos=torch.from_numpy(cos), sin=torch.from_numpy(sin))


def inverse_frequencies(rope: RopeConfig, num_positions: int) -> Frequencies:
    """Radians per position of each pair of dimensions, [rotary_dim / 2]: theta ** (-2i / rotary_dim), then scaled."""
    frequencies = _unscaled(rope.theta, rope.rotary_dim)
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)
        case DynamicScaling():
            return _dynamic(rope, rope.scaling, num_positions)
        case YarnScaling():
            return _yarn(frequencies, rope, rope.scaling)
        case LongRopeScaling():
            is_long = num_positions > rope.scaling.original_max_positions
            factors: Frequencies = np.array(rope.scaling.long_factors if is_long else rope.scaling.short_factors)
            return frequencies / factors


def _attention_factor(rope: RopeConfig) -> float:
    return rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling | LongRopeScaling) else 1.0


def _unscaled(theta: float, rotary_dim: int) -> Frequencies:
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim
    frequencies: Frequencies = theta**-exponents
    return frequencies


def _llama3(frequencies: Frequencies, scaling: Llama3Scaling) -> Frequencies:
    """Llama 3.1's scaling: by how many turns a pair makes within the original context.

    Fewer than `low_freq_factor` turns: divided by `factor`. More than `high_freq_factor`: kept. Linear between.
    """
    turns = scaling.original_max_positions * frequencies / (2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _blend(frequencies, scaling.factor, np.clip(kept, 0.0, 1.0))


def _dynamic(rope: RopeConfig, scaling: DynamicScaling, num_positions: int) -> Frequencies:
    """Dynamic NTK: the base grows so that the slowest pair turns as far over the length as over the original one."""
    stretch = max(num_positions, scaling.original_max_positions) / scaling.original_max_positions
    growth = scaling.factor * stretch - (scaling.factor - 1)
    return _unscaled(rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2)), rope.rotary_dim)


def _yarn(frequencies: Frequencies, rope: RopeConfig, scaling: YarnScaling) -> Frequencies:
    """YaRN, https://arxiv.org/abs/2309.00071, section 3.2: a ramp over the pairs, by turns in the original context."""

    def pair_of(turns: float) -> float:
        """The pair, as a real number, that makes so many turns."""
        wavelength = scaling.original_max_positions / turns
        return rope.rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))

    first, last = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The border may lie past the last pair, as in the paper's own code.
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first or 0.001
    interpolated = np.clip((np.arange(len(frequencies)) - first) / width, 0.0, 1.0)
    return _blend(frequencies, scaling.factor, 1 - interpolated)


def _blend(frequencies: Frequencies, factor: float, kept: Frequencies) -> Frequencies:
    """`kept` of each frequency as it is, the rest divided by `factor`."""
    return kept * frequencies + (1 - kept) * frequencies / factor
