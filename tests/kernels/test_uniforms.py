"""The counter-based random numbers: frozen values, an independent twin on Python integers, and their range."""

from __future__ import annotations

import numpy as np
import torch

from kernels.api import uniforms

MASK = 0xFFFFFFFF


def _twin(seed: int, position: int, token: int) -> float:
    def mix(x: int) -> int:
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
            x = ((x ^ x >> shift) * factor) & MASK
        return x ^ x >> 16

    key = (seed + 0x9E3779B97F4A7C15 * (position + 1)) % 2**64
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        key = ((key ^ key >> shift) * factor) % 2**64
    key ^= key >> 31
    return float(np.float32(((mix(mix(token ^ key & MASK) ^ key >> 32) >> 9) + 0.5) / 2**23))


IDS = (0, 1, 2, 49151, 151935)
# A change of these changes every seeded answer: that is a break with earlier versions, never a refactoring.
KNOWN = {
    (0, 0): (0.49679070711135864, 0.8693472743034363, 0.9489551186561584, 0.7331477999687195, 0.8297972083091736),
    (1, 0): (0.3784443736076355, 0.4284818768501282, 0.3016449809074402, 0.24367088079452515, 0.7375522255897522),
    (-1, 7): (0.35132771730422974, 0.6754518151283264, 0.5426098704338074, 0.8502412438392639, 0.8635221123695374),
    (2**63 - 1, 2**31): (
        0.4618949294090271,
        0.359657347202301,
        0.0351065993309021,
        0.5226264595985413,
        0.9506844878196716,
    ),
    (12345, 1000): (0.2570369839668274, 0.775482714176178, 0.32801228761672974, 0.7587020993232727, 0.891104519367218),
}


def test_known_values_and_the_twin() -> None:
    for (seed, position), expected in KNOWN.items():
        assert tuple(uniforms(seed, position, torch.tensor(IDS)).tolist()) == expected
        assert tuple(_twin(seed, position, token) for token in IDS) == expected


def test_a_negative_seed_is_its_unsigned_bits() -> None:
    ids = torch.arange(50)
    assert torch.equal(uniforms(-1, 3, ids), uniforms(2**64 - 1, 3, ids))


def test_numbers_are_inside_the_unit_interval_and_evenly_spread() -> None:
    numbers = torch.cat([uniforms(seed, 5, torch.arange(50_000)) for seed in range(4)])
    assert numbers.min() > 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 20, 0, 1)
    # The 99.9 % quantile of chi-square with 19 degrees of freedom.
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 43.8
    neighbours = torch.stack([uniforms(9, position, torch.arange(20_000)) for position in (1, 2)])
    assert torch.corrcoef(neighbours)[0, 1].abs() < 0.03
