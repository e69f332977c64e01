"""Sampling against a naive twin, its distribution, its limits and its logprobs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kernel_samples import RowParameters, expected_choice, sampling_batch

from kernels.api import Backend

VOCAB = 24
PADDING = 5
IDS = st.integers(0, VOCAB - 1)
# Multiples of 1/4 collide often, and every penalty below keeps them exact in fp32: ties stay ties.
LOGITS = st.lists(st.integers(-24, 24).map(lambda quarter: quarter / 4), min_size=VOCAB, max_size=VOCAB)
ROWS = st.builds(
    RowParameters,
    temperature=st.sampled_from([0.0, 0.25, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 7, VOCAB, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-6, 0.2137, 0.8123, 0.9971]),
    min_p=st.sampled_from([0.0, 0.0, 0.0123, 0.31, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31),
    prompt=st.lists(IDS, max_size=6),
    output=st.lists(IDS, max_size=6),
    repetition=st.sampled_from([1.0, 0.5, 2.0]),
    frequency=st.sampled_from([0.0, 0.5, -0.25]),
    presence=st.sampled_from([0.0, 1.5, -1.0]),
    bias=st.dictionaries(IDS, st.sampled_from([-100.0, -2.5, 4.0]), max_size=4),
    forbidden=st.lists(IDS, max_size=5, unique=True),
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
@given(st.lists(st.tuples(LOGITS, ROWS), min_size=1, max_size=4))
def test_choices_match_the_naive_twin(backend: Backend, cases: list[tuple[list[float], RowParameters]]) -> None:
    expectations = [expected_choice(logits, row) for logits, row in cases]
    assume(all(expectations))
    padded = torch.tensor([[*logits, *[math.inf] * PADDING] for logits, _ in cases])
    before = padded.clone()
    samples = backend.sample(padded, sampling_batch([row for _, row in cases], VOCAB))
    assert torch.equal(padded, before)
    assert samples.finite.all()
    assert samples.token_ids.dtype == torch.int64
    for token, expectation in zip(samples.token_ids.tolist(), expectations, strict=True):
        assert expectation is not None
        assert token in expectation.token_ids


def test_penalties_at_values_fp32_cannot_hold(backend: Backend) -> None:
    generator = np.random.default_rng(4)
    logits = generator.normal(0, 2, (32, VOCAB)).astype(np.float32)
    rows = [
        RowParameters(0.9, seed=i, prompt=(1, 2), output=(3, 3, 4), repetition=1.1, frequency=0.3, presence=0.7)
        for i in range(32)
    ]
    samples = backend.sample(torch.from_numpy(logits), sampling_batch(rows, VOCAB))
    for token, values, row in zip(samples.token_ids.tolist(), logits, rows, strict=True):
        expectation = expected_choice(values.tolist(), row)
        assert expectation is not None
        assert token in expectation.token_ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_ties_of_half_precision_go_to_the_lowest_id(backend: Backend, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 4096, dtype=dtype)
    logits[0, [70, 900, 4000]] = 3.0
    logits[1] = -0.0
    logits[1, 9] = 0.0
    logits[2, 4095] = 1.0
    rows = [RowParameters(), RowParameters(), RowParameters(temperature=1.0, top_k=1)]
    assert backend.sample(logits, sampling_batch(rows, 4096)).token_ids.tolist() == [70, 0, 4095]
    limits = [RowParameters(1.0, top_k=1), RowParameters(1.0, top_p=1e-6)]
    assert backend.sample(logits[[0, 0]], sampling_batch(limits, 4096)).token_ids.tolist() == [70, 70]


@pytest.mark.parametrize(
    "row",
    [
        RowParameters(temperature=1e-6),
        RowParameters(temperature=1.0, top_p=1e-6),
        RowParameters(temperature=2.0, top_k=1),
        RowParameters(temperature=1.0, min_p=1.0),
    ],
    ids=["temperature", "top_p", "top_k", "min_p"],
)
def test_limits_are_greedy(backend: Backend, row: RowParameters) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(3000, generator=generator).float() / 100 for _ in range(16)])
    samples = backend.sample(logits, sampling_batch([row] * 16, 3000))
    assert torch.equal(samples.token_ids, logits.argmax(-1))


def test_rows_with_nan_or_infinity_are_reported_and_harm_no_other(backend: Backend) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    rows = [RowParameters(temperature=i % 2, seed=i, top_p=0.9) for i in range(6)]
    clean = backend.sample(logits, sampling_batch(rows, 290))
    broken = logits.clone()
    broken[1, 7], broken[2, 8], broken[4, 289], broken[5, 290] = math.nan, math.inf, -math.inf, math.nan
    samples = backend.sample(broken, sampling_batch(rows, 290))
    assert samples.finite.tolist() == [True, False, False, True, False, True]
    assert samples.token_ids[[0, 3, 5]].tolist() == clean.token_ids[[0, 3, 5]].tolist()


def test_samples_follow_the_softmax(backend: Backend) -> None:
    logits = torch.tensor([1.0, 0.5, 0.0, -0.5, 2.0, -1.0, 0.25, 1.5])
    draws = 200 if backend.info.name == "triton" else 1500  # the interpreter takes its time
    by_position = [RowParameters(1.0, position=i) for i in range(draws)]
    by_seed = [RowParameters(0.6, top_k=5, seed=i) for i in range(draws)]
    for rows in (by_position, by_seed):
        temperature, top_k = rows[0].temperature, rows[0].top_k
        tokens = backend.sample(logits.expand(draws, -1).contiguous(), sampling_batch(rows, 8)).token_ids
        kept = logits.argsort(descending=True)[: top_k or 8]
        expected = torch.zeros(8, dtype=torch.float64)
        expected[kept] = torch.softmax(logits[kept].double() / temperature, -1) * draws
        counts = torch.bincount(tokens, minlength=8)
        assert counts.sum() == counts[kept].sum()
        chi_square = ((counts[kept] - expected[kept]) ** 2 / expected[kept]).sum()
        # The 99.9 % quantiles for 7 and 4 degrees of freedom.
        assert chi_square < {8: 24.3, 5: 18.5}[len(kept)]


def test_logprobs_are_the_log_softmax_of_raw_logits(backend: Backend) -> None:
    logits = torch.randn(5, 517, generator=torch.Generator().manual_seed(2)) * 5
    logits[:, 500:] = math.inf
    logits[0, [3, 9, 11]] = 40.0
    rows = [RowParameters(bias={7: 100.0}), *[RowParameters(1.0, seed=i) for i in range(4)]]
    samples = backend.sample(logits, sampling_batch(rows, 500, logprob_rows=[0, 2, 3], num_top=4))
    assert samples.logprobs is not None
    assert samples.token_ids[0] == 7
    picked = logits[[0, 2, 3], :500]
    truth = torch.log_softmax(picked.double(), -1)
    tokens = samples.token_ids[[0, 2, 3]]
    assert (samples.logprobs.token_logprobs - truth.gather(1, tokens[:, None])[:, 0]).abs().max() < 1e-5
    order = picked.sort(descending=True, stable=True).indices[:, :4]
    assert torch.equal(samples.logprobs.top_ids.long(), order)
    assert order[0, :3].tolist() == [3, 9, 11]
    assert (samples.logprobs.top_logprobs - truth.gather(1, order)).abs().max() < 1e-5
    assert samples.logprobs.top_ids.dtype == torch.int32
    assert backend.sample(logits, sampling_batch(rows, 500)).logprobs is None


def test_logprobs_of_given_tokens(backend: Backend) -> None:
    logits = torch.randn(70, 300, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    tokens = torch.arange(70) * 4
    given = backend.logprobs(logits, tokens, 0, 290)
    truth = torch.log_softmax(logits[:, :290].double(), -1).gather(1, tokens[:, None])[:, 0]
    assert (given.token_logprobs - truth).abs().max() < 1e-5
    assert given.top_ids.shape == (70, 0)
    with pytest.raises(ValueError, match="291"):
        backend.logprobs(logits, tokens, 291, 290)
