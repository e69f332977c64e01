"""Proofs in seconds that the kernels which would serve here compute what the reference does: `octavo doctor --run`.

Each takes the backend, by default the one that would serve, returns a sentence about what was compared, and raises
AssertionError with what differs. The tests hold the same
kernels to far more; these find a library that was built for another machine or a torch that computes something else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.api import (
    AttentionSpec,
    Backend,
    KVCache,
    KVCacheSpec,
    RaggedBatch,
    RopeTable,
    SamplingBatch,
)
from kernels.reference import ReferenceBackend
from kernels.select import open_backend

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK, _NUM_BLOCKS = 4, 2, 32, 16, 48
_WIDTH = (_HEADS + 2 * _KV_HEADS) * _HEAD_DIM
_LENGTHS = (300, 33, 1)
_TOLERANCE = 1e-4
_VOCAB = 997


def prove_kernels(backend: Backend | None = None) -> str:
    """Attention, norms, activations and products against the reference, and chunked prompts against whole ones."""
    backend, reference = backend or open_backend("auto", 1), ReferenceBackend()
    sequences = [_random(length, _WIDTH, seed=length) for length in _LENGTHS]
    whole = [_attended(backend, sequences, chunk) for chunk in (512, 48, 7)]
    expected = _attended(reference, sequences, 512)
    _demand_close("attention", whole[0], expected)
    if backend.info.batch_invariant and not all(torch.equal(whole[0], other) for other in whole[1:]):
        raise AssertionError("attention depends on how a prompt is cut into chunks")
    for name, (found, wanted) in _dense(backend, reference).items():
        _demand_close(name, found, wanted)
    chunks = ", the same bits in chunks of 512, 48 and 7" if backend.info.batch_invariant else ""
    return f"{_name(backend)} equals the reference to {_TOLERANCE:g} in attention, norms, products and more{chunks}"


def prove_sampler(backend: Backend | None = None) -> str:
    """The same tokens as the reference's from the same logits, seeds and parameters, and the same logprobs."""
    backend, reference = backend or open_backend("auto", 1), ReferenceBackend()
    num_rows = 64
    logits = 3 * _random(num_rows, _VOCAB + 3, seed=1)
    batch = _sampling_batch(num_rows)
    found, wanted = backend.sample(logits, batch), reference.sample(logits, batch)
    if not torch.equal(found.token_ids, wanted.token_ids):
        row = int((found.token_ids != wanted.token_ids).nonzero()[0])
        raise AssertionError(f"row {row}: token {found.token_ids[row]}, the reference chose {wanted.token_ids[row]}")
    if not bool(found.finite.all()) or found.logprobs is None or wanted.logprobs is None:
        raise AssertionError("finite logits were taken for NaN or infinity")
    _demand_close("logprobs", found.logprobs.token_logprobs, wanted.logprobs.token_logprobs)
    alone = backend.sample(logits[5:6].clone(), _sampling_batch(num_rows, only=5))
    if backend.info.batch_invariant and int(alone.token_ids[0]) != int(found.token_ids[5]):
        raise AssertionError("a row samples another token alone than among others")
    return f"{_name(backend)} chose the reference's tokens in {num_rows} rows of {_VOCAB} logits, greedy and random"


def prove_cache(backend: Backend | None = None) -> str:
    """Blocks keep what was written: exported, copied within a cache, and to a second one and back."""
    backend = backend or open_backend("auto", 1)
    device, host = (backend.allocate_kv_cache(_cache_spec(number)) for number in (_NUM_BLOCKS, 8))
    blocks = _random(2 * 4 * _KV_HEADS * _BLOCK, _HEAD_DIM, seed=2).view(2, 4, _KV_HEADS, _BLOCK, _HEAD_DIM)
    backend.import_blocks(device, 1, [5, 0, 40, 7], blocks)
    backend.copy_blocks(device, [5, 0, 40, 7], host, [0, 1, 2, 3])
    backend.copy_blocks(host, [3, 2, 1, 0], device, [11, 12, 13, 14])
    backend.copy_blocks(device, [5], device, [20])
    for ids, expected in (
        ([5, 0, 40, 7], blocks),
        ([14, 13, 12, 11], blocks),
        ([20], blocks[:, :1]),
    ):
        if not torch.equal(backend.export_blocks(device, 1, ids), expected):
            raise AssertionError(f"blocks {ids} do not hold what was written")
    if bool(backend.export_blocks(device, 0, [5]).any()):
        raise AssertionError("a write to one layer reached another")
    return f"{_name(backend)} keeps blocks through export, copies and a second cache"


def _attended(backend: Backend, sequences: Sequence[Tensor], chunk: int) -> Tensor:
    """Every sequence's attention output, run together in chunks of so many tokens."""
    cache = backend.allocate_kv_cache(_cache_spec(_NUM_BLOCKS))
    order = torch.randperm(_NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[order.pop() for _ in range(-(-len(sequence) // _BLOCK))] for sequence in sequences]
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    for begin in range(0, max(map(len, sequences)), chunk):
        rows = [index for index, sequence in enumerate(sequences) if begin < len(sequence)]
        pieces = [sequences[row][begin : begin + chunk] for row in rows]
        attended = _step(backend, cache, pieces, begin, [tables[row] for row in rows])
        for row, output in zip(rows, torch.split(attended, [len(piece) for piece in pieces]), strict=True):
            outputs[row].append(output)
    return torch.cat([torch.cat(output) for output in outputs])


def _step(
    backend: Backend, cache: KVCache, pieces: Sequence[Tensor], begin: int, tables: Sequence[Sequence[int]]
) -> Tensor:
    """One step whose rows all begin at the same position."""
    lengths = [len(piece) for piece in pieces]
    width = max(map(len, tables))
    batch = RaggedBatch(
        query_starts=_int32([0, *torch.tensor(lengths).cumsum(0).tolist()]),
        context_lens=_int32([begin + length for length in lengths]),
        block_tables=_int32([[*table, *[0] * (width - len(table))] for table in tables]),
        positions=_int32([begin + offset for length in lengths for offset in range(length)]),
        num_rows=len(pieces),
        num_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_context_len=begin + max(lengths),
    )
    plan = backend.plan_attention(batch, cache)
    qkv = torch.cat(list(pieces))
    backend.rope_write_kv(qkv, cache, 1, plan, _rope(), None)
    return backend.attention(qkv, cache, 1, plan, AttentionSpec(_HEADS, _HEAD_DIM**-0.5))


def _dense(backend: Backend, reference: Backend) -> dict[str, tuple[Tensor, Tensor]]:
    """Operation -> what the backend and what the reference give."""
    x, gain = _random(9, 128, seed=4), 1 + _random(1, 128, seed=5)[0]
    weight, bias = _random(80, 128, seed=6) / 11, _random(1, 80, seed=7)[0]
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for name in ("rms_norm", "silu_mul", "gelu_mul", "linear"):
        pair = []
        for kernels in (backend, reference):
            if name == "linear":
                pair.append(kernels.linear(x.clone(), kernels.pack_linear(weight.clone(), bias.clone())))
            elif name == "rms_norm":
                pair.append(kernels.rms_norm(x.clone(), gain, 1e-5))
            else:
                pair.append(getattr(kernels, name)(x.clone()))
        results[name] = (pair[0], pair[1])
    return results


def _sampling_batch(num_rows: int, only: int | None = None) -> SamplingBatch:
    """Rows from greedy to hot, with top-k, top-p and min-p among them; `only` one of them."""
    rows = [only] if only is not None else list(range(num_rows))
    nothing = _int32([0] * (len(rows) + 1))
    return SamplingBatch(
        temperatures=torch.tensor([(row % 4) * 0.5 for row in rows]),
        top_ks=_int32([(0, 50, 0, 5)[row % 4] for row in rows]),
        top_ps=torch.tensor([(1.0, 1.0, 0.9)[row % 3] for row in rows]),
        min_ps=torch.tensor([(0.0, 0.0, 0.0, 0.0, 0.05)[row % 5] for row in rows]),
        seeds=torch.tensor([1000 + row for row in rows], dtype=torch.int64),
        positions=torch.tensor([7 * row for row in rows], dtype=torch.int64),
        repetition_penalties=torch.ones(len(rows)),
        frequency_penalties=torch.zeros(len(rows)),
        presence_penalties=torch.zeros(len(rows)),
        history_starts=nothing,
        history_ids=_int32([]),
        history_prompt_lens=_int32([0] * len(rows)),
        bias_starts=nothing,
        bias_ids=_int32([]),
        bias_values=torch.tensor([], dtype=torch.float32),
        forbidden_starts=nothing,
        forbidden_ids=_int32([]),
        logprob_rows=_int32(list(range(len(rows)))),
        num_top=0,
        vocab_size=_VOCAB,
    )


def _cache_spec(num_blocks: int) -> KVCacheSpec:
    return KVCacheSpec(2, num_blocks, _BLOCK, _KV_HEADS, _HEAD_DIM, torch.float32)


def _rope() -> RopeTable:
    angles = torch.outer(torch.arange(512), 10000.0 ** -(torch.arange(_HEAD_DIM // 2) / (_HEAD_DIM // 2)))
    return RopeTable(angles.cos().float(), angles.sin().float())


def _random(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def _int32(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _demand_close(name: str, found: Tensor, expected: Tensor) -> None:
    worst = float((found.float() - expected.float()).abs().max())
    if not worst <= _TOLERANCE:  # NaN is no less wrong
        raise AssertionError(f"{name} differs from the reference by {worst:g}; at most {_TOLERANCE:g} is rounding")


def _name(backend: Backend) -> str:
    return f"{backend.info.name} ({backend.info.variant})"
