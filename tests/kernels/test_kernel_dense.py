"""Linears, norms and the gated activation against fp64; elementary functions of the reference against numpy."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.api import Backend
from kernels.linear import operators_support, rows_agree
from kernels.reference import ReferenceBackend, elementary

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Units in the last place that one rounding, or fp32 accumulation, may cost.
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded(actual: Tensor, expected: Tensor) -> None:
    """`actual` is the fp64 `expected` rounded to its dtype, give or take what fp32 arithmetic loses before."""
    error = (actual.double() - expected).abs()
    assert (error <= RELATIVE[actual.dtype] * (1.01 * expected.abs() + 1e-3)).all(), float(error.max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "columns", "depth"), [(1, 96, 64), (3, 960, 576), (40, 72, 1536), (520, 33, 40)])
def test_linear(backend: Backend, dtype: torch.dtype, num_rows: int, columns: int, depth: int) -> None:
    x, weight = randn(num_rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype, seed=1)
    bias = randn(columns, dtype=dtype, seed=2)
    for packed, offset in (
        (backend.pack_linear(weight, None), torch.zeros(columns)),
        (backend.pack_linear(weight, bias), bias),
    ):
        assert (packed.in_features, packed.out_features) == (depth, columns)
        result = backend.linear(x, packed)
        assert result.dtype == dtype
        expected = x.double() @ weight.double().T + offset.double()
        scale = depth**0.5
        assert (result.double() - expected).abs().max() < RELATIVE[dtype] * 4 * scale


def test_a_vocabulary_wider_than_one_part(backend: Backend) -> None:
    weight = randn(8192 + 37, 32)
    x = randn(5, 32, seed=1)
    expected = x.double() @ weight.double().T
    assert (backend.linear(x, backend.pack_linear(weight, None)).double() - expected).abs().max() < 5e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 576, 97])
def test_rms_norms(backend: Backend, dtype: torch.dtype, width: int) -> None:
    x, weight = randn(7, width, dtype=dtype), randn(width, dtype=dtype, seed=1)
    residual = randn(7, width, dtype=dtype, seed=2)

    def expected(rows: Tensor) -> Tensor:
        rows = rows.double()
        return rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    assert_rounded(backend.rms_norm(x, weight, 1e-5), expected(x))
    total = residual + x
    normed = backend.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert_rounded(normed, expected(total))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(backend: Backend, dtype: torch.dtype) -> None:
    gate_up = randn(6, 2 * 97, dtype=dtype) * 4
    gate_up[0, :4] = torch.tensor([0.0, -60.0, 60.0, -20.0])
    gate, up = gate_up.double().chunk(2, -1)
    result = backend.silu_mul(gate_up)
    assert_rounded(result, gate * torch.sigmoid(gate) * up)
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_mul(backend: Backend, dtype: torch.dtype) -> None:
    gate_up = randn(6, 2 * 97, dtype=dtype) * 4
    gate_up[0, :4] = torch.tensor([0.0, -60.0, 60.0, -20.0])
    gate, up = gate_up.double().chunk(2, -1)
    result = backend.gelu_mul(gate_up)
    assert_rounded(result, torch.nn.functional.gelu(gate, approximate="tanh") * up)
    assert torch.isfinite(result).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap(backend: Backend, dtype: torch.dtype) -> None:
    x = randn(5, 103, dtype=dtype) * 40
    x[0, :4] = torch.tensor([0.0, -500.0, 500.0, 1e-3])
    result = backend.soft_cap(x, 30.0)
    assert result.dtype == torch.float32
    assert (result.double() - 30.0 * torch.tanh(x.double() / 30.0)).abs().max() < 1e-5
    assert result.abs().max() <= 30.0
    # What is no number stays none, so that a row that went wrong is found.
    assert backend.soft_cap(torch.full((1, 3), torch.nan, dtype=dtype), 30.0).isnan().all()


def test_exp_and_log_are_accurate() -> None:
    x = torch.linspace(-86.9, 87.9, 100_001)
    truth = np.exp(x.double().numpy())
    assert np.abs(elementary.exp(x).double().numpy() / truth - 1).max() < 2 * 2.0**-23
    assert np.abs(elementary.exp(x.double()).numpy() / truth - 1).max() < 2 * 2.0**-52
    u = torch.cat((torch.linspace(2.0**-24, 1 - 2.0**-24, 100_001, dtype=torch.float64), x.double().exp()))
    truth = np.log(u.numpy())
    assert np.abs(elementary.log(u).numpy() - truth).max() < 4e-14
    near = np.abs(truth) < 1
    assert np.abs(elementary.log(u).numpy()[near] - truth[near]).max() < 5e-16
    assert np.abs(elementary.tanh(x).numpy() - np.tanh(x.numpy())).max() < 2e-7


def test_exp_at_its_limits() -> None:
    x = torch.tensor([0.0, -math.inf, math.inf, math.nan, -88.0, 89.0])
    result = elementary.exp(x)
    assert result[:3].tolist() == [1.0, 0.0, math.inf]
    assert result[3].isnan()
    assert result[4:].tolist() == [0.0, math.inf]


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13, 576])
def test_sum_last_counts_every_element_once(length: int) -> None:
    values = torch.randint(-1000, 1000, (4, length), generator=torch.Generator().manual_seed(length)).float()
    assert torch.equal(elementary.sum_last_(values.clone()), values.double().sum(-1).float())


def test_a_product_whose_rows_depend_on_their_number_is_found_out() -> None:
    weight, distinct = randn(24, 16), randn(13, 16, seed=1)

    def fair(x: Tensor) -> Tensor:
        return (x[:, None] * weight).sum(-1)

    def another_kernel_from_64_rows(x: Tensor) -> Tensor:
        return fair(x) * (1 + 2.0**-23 if len(x) >= 64 else 1)

    def another_kernel_for_the_last_row(x: Tensor) -> Tensor:
        result = fair(x)
        result[-1] *= 1 + 2.0**-23
        return result

    assert rows_agree(fair, distinct)
    assert not rows_agree(another_kernel_from_64_rows, distinct)
    assert not rows_agree(another_kernel_for_the_last_row, distinct)


@pytest.mark.parametrize("lacking", ["_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"])
def test_a_torch_without_one_of_the_private_operators_is_found_out(lacking: str) -> None:
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported")
    whole = SimpleNamespace(**dict.fromkeys(names, lambda: True))
    assert operators_support(whole, torch.bfloat16)
    assert operators_support(whole, torch.float32)
    assert not operators_support(whole, torch.float64)
    less = SimpleNamespace(**dict.fromkeys((name for name in names if name != lacking), lambda: True))
    assert not operators_support(less, torch.bfloat16)
    assert operators_support(less, torch.float32) is lacking.startswith("_is")


def test_a_weight_that_cannot_be_packed_withdraws_the_claim() -> None:
    backend = ReferenceBackend()
    assert backend.info.batch_invariant
    weight = randn(8, 16).double()
    packed = backend.pack_linear(weight, None)
    assert not backend.info.batch_invariant
    assert "float64" in backend.info.invariance_note
    x = randn(3, 16, seed=1).double()
    assert torch.allclose(backend.linear(x, packed), x @ weight.T)


def test_a_weight_of_another_width_is_refused(backend: Backend) -> None:
    packed = backend.pack_linear(randn(32, 64), None)
    with pytest.raises(ValueError, match="64"):
        backend.linear(randn(2, 48), packed)
