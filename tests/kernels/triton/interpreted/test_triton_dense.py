"""Norms, activations, products and choices: every address inside its tensors, rows far apart too, and no races."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from interpreter import interpreted_backend, sanitizer
from kernel_samples import RowParameters, sampling_batch
from torch import Tensor

BF16 = torch.bfloat16
# No multiple of a tile's width.
WIDTH = 72


def sampled(x: Tensor) -> Tensor:
    rows = [RowParameters(1.0, top_k=5, seed=row, output=(1, 2), presence=0.5, forbidden=(3,)) for row in range(len(x))]
    samples = interpreted_backend().sample(x, sampling_batch(rows, WIDTH - 1, logprob_rows=[0, len(x) - 1], num_top=2))
    assert samples.logprobs is not None
    return torch.cat((samples.token_ids.double(), samples.logprobs.top_logprobs.double().flatten()))


def product(x: Tensor) -> Tensor:
    weight = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    backend = interpreted_backend()
    return backend.linear(x, backend.pack_linear(weight, weight[:, 0].clone()))


def summed(x: Tensor) -> Tensor:
    residual, weight = torch.ones(x.shape, dtype=x.dtype), torch.ones(WIDTH, dtype=x.dtype)
    return torch.cat((interpreted_backend().add_rms_norm(x, residual, weight, 1e-6), residual))


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: interpreted_backend().rms_norm(x, torch.ones(WIDTH, dtype=x.dtype), 1e-6),
    "add_rms_norm": summed,
    "silu_mul": lambda x: interpreted_backend().silu_mul(x),
    "gelu_mul": lambda x: interpreted_backend().gelu_mul(x),
    "soft_cap": lambda x: interpreted_backend().soft_cap(x, 3.0),
    "linear": product,
    "sample": sampled,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_past_two_billion_elements(name: str) -> None:
    """Rows 2^30 elements apart, in memory whose pages exist only where they are touched."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).to(BF16)
    apart = torch.empty((3 << 30) + WIDTH, dtype=BF16).as_strided((4, WIDTH), (1 << 30, 1))
    apart.copy_(x)
    with sanitizer() as launches:
        assert torch.equal(OPERATIONS[name](apart), OPERATIONS[name](x))
    assert launches.num_addresses > 2 * x.numel()
