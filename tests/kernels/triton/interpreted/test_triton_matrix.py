"""Attention over the product of all that it is asked to take, thinned so that every three values of it still meet.

Each case against the fp64 oracle; in every second one every address and race is checked; with fixed partitions, bitwise
against another cut of the prompts into chunks.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from attention_checks import BF16, FP8, FP16, FP32, LENGTHS, STEPS, assert_near_oracle
from covering import covering_cases
from interpreter import interpreted_backend, sanitizer
from kernel_steps import Geometry, Step, chunked, run_steps
from torch import Tensor

CUTS: dict[str, tuple[Step, ...]] = {
    "mixed": STEPS,
    "whole": tuple(chunked(LENGTHS, 512)),
    "chunks of 77": tuple(chunked(LENGTHS, 77)),
    "the last alone": ([(1, 15), (2, 32), (3, 269)], [(3, 1), (0, 1), (1, 1), (2, 1)]),
}
AXES: dict[str, tuple[Any, ...]] = {
    # Of activations and of the cache.
    "dtypes": ((BF16, BF16), (FP16, FP16), (BF16, FP8), (FP16, FP8), (FP32, FP32), (FP32, BF16)),
    "head_dim": (64, 72, 80, 96, 128, 256),
    "block_size": (8, 16, 32, 64, 256),
    "window": (None, 1, 40, 256),
    "soft_cap": (None, 25.0),
    "partitioned": (False, True),
    # Query heads of a KV head.
    "group": (1, 2, 3, 5, 7, 8, 16),
    "num_kv_heads": (1, 2),
    "cut": tuple(CUTS),
    "sanitized": (False, True),
    "qk_norm": (False, True),
}
CLOSELY = ("dtypes", "head_dim", "block_size", "window", "soft_cap", "partitioned")
CASES = covering_cases(AXES, CLOSELY)


def name_of(case: dict[str, Any]) -> str:
    dtypes = "-".join(str(dtype).removeprefix("torch.") for dtype in case["dtypes"])
    return "-".join([dtypes, *(f"{axis}={case[axis]}" for axis in AXES if axis != "dtypes")])


def attended(geometry: Geometry, case: dict[str, Any], cut: str, num_multiprocessors: int) -> list[Tensor]:
    backend = interpreted_backend(case["partitioned"], num_multiprocessors)
    with sanitizer() if case["sanitized"] else contextlib.nullcontext():
        return run_steps(backend, geometry, geometry.sequences(LENGTHS), CUTS[cut])[0]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_whole_matrix(case: dict[str, Any]) -> None:
    geometry = Geometry(
        case["group"] * case["num_kv_heads"],
        case["num_kv_heads"],
        case["head_dim"],
        case["block_size"],
        *case["dtypes"],
        window=case["window"],
        soft_cap=case["soft_cap"],
        qk_norm=case["qk_norm"],
        scales=(0.02, 0.03) if case["dtypes"][1] == FP8 else None,
    )
    outputs = attended(geometry, case, case["cut"], 2)
    assert_near_oracle(geometry, geometry.sequences(LENGTHS), outputs)
    if case["partitioned"]:
        others = attended(geometry, case, "whole" if case["cut"] == "mixed" else "mixed", 1)
        assert all(a.equal(b) for a, b in zip(outputs, others, strict=True))


def test_the_matrix_has_every_value_that_is_promised() -> None:
    """And every three of them meet: of dtypes, sizes, window, cap and partitions."""
    assert {case["head_dim"] for case in CASES} >= {64, 80, 96, 128, 256}
    for first, second, third in (("dtypes", "head_dim", "block_size"), ("head_dim", "window", "soft_cap")):
        met = {(case[first], case[second], case[third]) for case in CASES}
        assert len(met) == len(AXES[first]) * len(AXES[second]) * len(AXES[third])
