"""Sampling of the Triton kernels: the ids of the reference for random rows; in any company; inside its tensors.

What the API asks of every backend is in tests/kernels/test_kernel_sampling.py, of which the interpreter has time for
all but the long searches.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from interpreter import install, interpreted_backend, sanitizer
from kernel_samples import RowParameters, sampling_batch
from torch import Tensor

install()
from kernels.reference import sampling as reference  # noqa: E402
from kernels.triton import sampling  # noqa: E402


def random_rows(count: int, vocab: int, seed: int) -> list[RowParameters]:
    """Greedy and sampled rows with any combination of limits and adjustments."""
    draw = np.random.default_rng(seed)

    def some(*values: float) -> float:
        return float(draw.choice(values))

    def ids(limit: int) -> tuple[int, ...]:
        return tuple(int(x) for x in draw.integers(0, vocab, int(draw.integers(0, limit)) * int(some(0, 1))))

    return [
        RowParameters(
            temperature=some(0.0, 0.2, 0.7, 1.0, 3.0),
            top_k=int(some(0, 0, 1, 5, 40, vocab // 2)),
            top_p=some(1.0, 1.0, 0.3, 0.9, 0.99, 1e-6),
            min_p=some(0.0, 0.0, 0.02, 0.3),
            seed=int(draw.integers(-(2**63), 2**63)),
            position=int(draw.integers(0, 2**40)),
            prompt=ids(60),
            output=ids(60),
            repetition=some(1.0, 1.3, 0.8),
            frequency=some(0.0, 0.4),
            presence=some(0.0, -0.6),
            bias={token: some(-3.25, 2.5, -100.0) for token in ids(4)},
            forbidden=sorted(set(ids(30))),
        )
        for _ in range(count)
    ]


def random_logits(count: int, vocab: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(count, 1, generator=generator) * 6
    return (torch.randn(count, vocab, generator=generator) * scale).to(dtype)


def assert_same_ids(logits: Tensor, rows: list[RowParameters], vocab: int) -> None:
    batch = sampling_batch(rows, vocab)
    expected, found = reference.sample(logits, batch), sampling.sample(logits, batch)
    differing = (expected.token_ids != found.token_ids).nonzero().flatten().tolist()
    assert not differing, [(row, rows[row]) for row in differing[:3]]
    assert torch.equal(expected.finite, found.finite)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ids_are_the_references(dtype: torch.dtype) -> None:
    assert_same_ids(random_logits(8, 517, 1, dtype), random_rows(8, 500, 2), 500)


def test_ids_are_the_references_over_several_parts_of_a_row() -> None:
    assert_same_ids(random_logits(3, 9001, 3), random_rows(3, 9000, 4), 9000)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_ids_are_the_references_over_many_rows(seed: int) -> None:
    dtype = (torch.float32, torch.bfloat16, torch.float16)[seed % 3]
    assert_same_ids(random_logits(100, 1200, seed, dtype), random_rows(100, 1111, seed), 1111)
    assert_same_ids(random_logits(10, 20_000, seed, dtype), random_rows(10, 19_999, seed), 19_999)


def limits() -> list[RowParameters]:
    return [
        RowParameters(1.0, top_k=800, seed=1),
        RowParameters(1.0, top_p=0.55, seed=2),
        RowParameters(1.0, top_k=1300, top_p=0.8, seed=3),
        RowParameters(0.8, min_p=0.01, seed=4),
    ]


def test_borders_among_more_tokens_than_are_sorted() -> None:
    """Flat rows: brackets are narrowed by the bits of the logits, down to one number where thousands are tied."""
    flat = random_logits(4, 1900, 7) * 0.01
    tied = (flat * 400).round() / 400
    assert_same_ids(torch.cat((flat, tied, torch.zeros_like(flat))), limits() * 3, 1900)


def test_rows_of_infinities_end_and_choose_an_id() -> None:
    logits = random_logits(8, 300, 9)
    logits[0], logits[1], logits[2, 5], logits[3] = math.nan, -math.inf, math.inf, -math.inf
    rows = [RowParameters(i % 2, top_p=0.9 if i % 3 else 1.0, forbidden=range(300) if i > 5 else ()) for i in range(8)]
    samples = sampling.sample(logits, sampling_batch(rows, 300, logprob_rows=[0, 1, 4], num_top=3))
    assert samples.finite.tolist() == [False] * 4 + [True] * 4
    assert ((samples.token_ids >= 0) & (samples.token_ids < 300)).all()
    assert samples.token_ids[6:].tolist() == [0, 0]


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    rows, logits = random_rows(4, 700, 11), random_logits(4, 700, 12)
    everyone = list(range(4))
    whole = sampling.sample(logits, sampling_batch(rows, 700, logprob_rows=everyone, num_top=3))
    assert whole.logprobs is not None
    for row in everyone:
        alone = sampling.sample(logits[row : row + 1], sampling_batch([rows[row]], 700, logprob_rows=[0], num_top=3))
        assert alone.logprobs is not None
        assert alone.token_ids[0] == whole.token_ids[row]
        for name in ("token_logprobs", "top_ids", "top_logprobs"):
            assert torch.equal(getattr(alone.logprobs, name)[0], getattr(whole.logprobs, name)[row])


def test_every_address_is_inside_its_tensors_and_no_programs_race() -> None:
    with sanitizer() as launches:
        logits, rows = random_logits(3, 5000, 5), random_rows(3, 4990, 6)
        rows[0] = RowParameters(1.0, top_k=3000, top_p=0.5, prompt=(1, 2), output=(4989, 3), forbidden=(4988, 0))
        batch = sampling_batch(rows, 4990, logprob_rows=[0, 2], num_top=2)
        interpreted_backend().sample(logits, batch)
    assert launches.num_addresses > 30_000
