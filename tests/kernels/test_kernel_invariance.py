"""Batch invariance, bitwise: a row alone or among others, a prompt in any chunks, one thread or two.

Only a backend that claims it is held to it; that the reference claims it on this machine is a test of its own.
"""

from __future__ import annotations

import pytest
import torch
from kernel_samples import RowParameters, sampling_batch
from kernel_steps import Geometry, OpenBackend, Step, chunked, run_steps
from torch import Tensor

from kernels.api import Backend, PackedLinear
from kernels.linear import onednn_supports
from kernels.reference import ReferenceBackend
from kernels.reference.attention import group_products_agree

DTYPES = (torch.float32, torch.bfloat16)
# More rows than any kernel's tile, and enough elements that torch splits them over threads at odd places.
NUM_ROWS = 601
PLACES = ((0, 1), (600, 601), (0, 2), (5, 8), (100, 117), (3, 66), (64, 129), (0, 601))

LENGTHS = (1, 40, 270)
ATTENTIONS = {
    "gqa-bf16": Geometry(9, 3, 64, dtype=torch.bfloat16, cache_dtype=torch.bfloat16),
    "mha-fp32": Geometry(3, 3, 64),
    "mqa-window-cap": Geometry(4, 1, 80, block_size=8, window=70, soft_cap=15.0, qk_norm=True),
}


def test_the_reference_claims_invariance_for_real_shapes() -> None:
    if not onednn_supports(torch.float32):
        pytest.skip("this torch has no oneDNN product of packed weights")
    backend = ReferenceBackend()
    Geometry(9, 3, 64).allocate(backend, 4)
    for columns, depth in ((960, 576), (576, 576), (3072, 576), (576, 1536)):
        for dtype in DTYPES:
            backend.pack_linear(torch.zeros(columns, depth, dtype=dtype), None)
    assert backend.info.batch_invariant, backend.info.invariance_note


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_reference_claims_invariance_for_every_group_at_any_number_of_threads(num_threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        assert [group for group in range(1, 9) if not group_products_agree(group, 64)] == []
    finally:
        torch.set_num_threads(before)


def rows_of(width: int, dtype: torch.dtype, num_rows: int = NUM_ROWS) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(width)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(960, 576), (576, 1536), (8192 + 100, 64), (64, 2100)])
def test_linear(open_with_threads: OpenBackend, columns: int, depth: int, dtype: torch.dtype) -> None:
    weight, x = rows_of(depth, dtype, columns), rows_of(depth, dtype)
    bias = weight[:, 0].clone()
    one, packed = pack(open_with_threads(1), weight, bias)
    whole = one.linear(x, packed)
    for num_threads in (1, 2):
        backend, packed = pack(open_with_threads(num_threads), weight, bias)
        for begin, end in PLACES:
            alone = backend.linear(x[begin:end].clone(), packed)
            assert torch.equal(alone, whole[begin:end]), f"rows {begin}:{end}, {num_threads} threads"


def pack(backend: Backend, weight: Tensor, bias: Tensor) -> tuple[Backend, PackedLinear]:
    packed = backend.pack_linear(weight.clone(), bias.clone())
    if not backend.info.batch_invariant:
        pytest.skip(backend.info.invariance_note)
    return backend, packed


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activation(open_with_threads: OpenBackend, dtype: torch.dtype) -> None:
    x, residual, weight = rows_of(579, dtype), rows_of(579, dtype).flip(0), rows_of(579, dtype)[7]
    gate_up = rows_of(2 * 401, dtype)
    one = open_with_threads(1)
    normed, activated = one.rms_norm(x, weight, 1e-6), one.silu_mul(gate_up)
    gelu, capped = one.gelu_mul(gate_up), one.soft_cap(x, 2.0)
    added = one.add_rms_norm(x, residual.clone(), weight, 1e-6)
    for num_threads in (1, 2):
        backend = open_with_threads(num_threads)
        # Each of several counts puts the border between two threads' shares elsewhere.
        counts = range(183, NUM_ROWS, 37) if num_threads > 1 else ()
        for begin, end in (*PLACES, *((0, count) for count in counts)):
            rows = slice(begin, end)
            assert torch.equal(backend.rms_norm(x[rows].clone(), weight, 1e-6), normed[rows])
            assert torch.equal(backend.silu_mul(gate_up[rows].clone()), activated[rows])
            assert torch.equal(backend.gelu_mul(gate_up[rows].clone()), gelu[rows])
            assert torch.equal(backend.soft_cap(x[rows].clone(), 2.0), capped[rows])
            alone = backend.add_rms_norm(x[rows].clone(), residual[rows].clone(), weight, 1e-6)
            assert torch.equal(alone, added[rows])


SCHEDULES: dict[str, list[Step]] = {
    "chunks of 1": list(chunked(LENGTHS, 1)),
    "chunks of 7": list(chunked(LENGTHS, 7)),
    "chunks of 64": list(chunked(LENGTHS, 64)),
    "whole": list(chunked(LENGTHS, 512)),
    "prefill beside decode": [[(2, 250)], *([(2, 1), (1, 7)] for _ in range(5)), [(1, 5), (0, 1), (2, 15)]],
}
# Two threads are dear where two cores are taken; the splits over rows, heads and columns all occur in these.
THREADED_SCHEDULES = ("chunks of 64", "prefill beside decode")


@pytest.mark.parametrize("geometry", ATTENTIONS.values(), ids=ATTENTIONS)
def test_attention_over_chunkings_and_company(open_with_threads: OpenBackend, geometry: Geometry) -> None:
    sequences = geometry.sequences(LENGTHS)
    one = open_with_threads(1)
    # Each alone, its prompt whole.
    alone = [run_steps(one, geometry, [sequence], [[(0, len(sequence))]]) for sequence in sequences]
    runs = [(1, name) for name in SCHEDULES] + [(2, name) for name in THREADED_SCHEDULES]
    for num_threads, name in runs:
        outputs, queries = run_steps(open_with_threads(num_threads), geometry, sequences, SCHEDULES[name])
        for (output, query), together, rotated in zip(alone, outputs, queries, strict=True):
            assert torch.equal(output[0], together), f"{name}, {num_threads} threads, length {len(together)}"
            assert torch.equal(query[0], rotated), f"{name}, {num_threads} threads, length {len(together)}"


def test_sampling_and_logprobs(open_with_threads: OpenBackend) -> None:
    vocab_size = 49_153
    logits = rows_of(vocab_size + 63, torch.float32, 6) * 4
    rows = [
        RowParameters(temperature=1.0, seed=3, position=7),
        RowParameters(),
        RowParameters(temperature=0.7, top_p=0.9, seed=-5, position=90),
        RowParameters(temperature=1.5, top_k=50, min_p=0.01, seed=2**40, position=1),
        RowParameters(temperature=1.0, prompt=(1, 2, 3), output=(9, 9, 4), repetition=1.3, frequency=0.4, presence=0.2),
        RowParameters(temperature=2.0, bias={5: 3.0}, forbidden=(1, 2), seed=77),
    ]
    one = open_with_threads(1)
    together = one.sample(logits, sampling_batch(rows, vocab_size, logprob_rows=range(6), num_top=20))
    assert together.logprobs is not None
    for num_threads in (1, 2):
        backend = open_with_threads(num_threads)
        for row, parameters in enumerate(rows):
            batch = sampling_batch([parameters], vocab_size, logprob_rows=[0], num_top=20)
            alone = backend.sample(logits[row : row + 1].clone(), batch)
            assert alone.logprobs is not None
            assert alone.token_ids[0] == together.token_ids[row]
            assert torch.equal(alone.logprobs.token_logprobs[0], together.logprobs.token_logprobs[row])
            assert torch.equal(alone.logprobs.top_ids[0], together.logprobs.top_ids[row])
            assert torch.equal(alone.logprobs.top_logprobs[0], together.logprobs.top_logprobs[row])
        given = backend.logprobs(logits, together.token_ids, 20, vocab_size)
        assert torch.equal(given.token_logprobs, together.logprobs.token_logprobs)
