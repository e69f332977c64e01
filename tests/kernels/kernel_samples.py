"""Sampling for tests: a batch from per-row parameters, and a naive twin of one row in fp64 numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels.api import SamplingBatch, uniforms


@dataclass(frozen=True)
class RowParameters:
    """One row of a SamplingBatch; the defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    forbidden: Sequence[int] = ()


def sampling_batch(
    rows: Sequence[RowParameters], vocab_size: int, logprob_rows: Sequence[int] = (), num_top: int = 0
) -> SamplingBatch:
    def ragged(lists: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        ends = np.cumsum([0, *map(len, lists)])
        return tensor(ends, torch.int32), tensor([value for values in lists for value in values], torch.int32)

    history_starts, history_ids = ragged([(*row.prompt, *row.output) for row in rows])
    bias_starts, bias_ids = ragged([tuple(row.bias) for row in rows])
    forbidden_starts, forbidden_ids = ragged([row.forbidden for row in rows])
    return SamplingBatch(
        temperatures=tensor([row.temperature for row in rows], torch.float32),
        top_ks=tensor([row.top_k for row in rows], torch.int32),
        top_ps=tensor([row.top_p for row in rows], torch.float32),
        min_ps=tensor([row.min_p for row in rows], torch.float32),
        seeds=tensor([row.seed for row in rows], torch.int64),
        positions=tensor([row.position for row in rows], torch.int64),
        repetition_penalties=tensor([row.repetition for row in rows], torch.float32),
        frequency_penalties=tensor([row.frequency for row in rows], torch.float32),
        presence_penalties=tensor([row.presence for row in rows], torch.float32),
        history_starts=history_starts,
        history_ids=history_ids,
        history_prompt_lens=tensor([len(row.prompt) for row in rows], torch.int32),
        bias_starts=bias_starts,
        bias_ids=bias_ids,
        bias_values=tensor([value for row in rows for value in row.bias.values()], torch.float32),
        forbidden_starts=forbidden_starts,
        forbidden_ids=forbidden_ids,
        logprob_rows=tensor(list(logprob_rows), torch.int32),
        num_top=num_top,
        vocab_size=vocab_size,
    )


def tensor(values: object, dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype)


@dataclass(frozen=True)
class Expectation:
    """The twin's verdict: the ids that may be chosen, several only where rounding could decide between them."""

    token_ids: frozenset[int]
    kept: tuple[int, ...]


def adjusted(logits: Sequence[float], row: RowParameters) -> list[float]:
    """Bias, penalties and forbidden ids on one row, in fp64."""
    scores = list(map(float, logits))
    for token, value in row.bias.items():
        scores[token] += value
    for token in set(row.prompt) | set(row.output):
        scores[token] = scores[token] / row.repetition if scores[token] > 0 else scores[token] * row.repetition
    for token in set(row.output):
        scores[token] -= list(row.output).count(token) * row.frequency + row.presence
    for token in row.forbidden:
        scores[token] = -math.inf
    return scores


def expected_choice(logits: Sequence[float], row: RowParameters, slack: float = 1e-5) -> Expectation | None:
    """What SamplingBatch's words say for one row; None where a top-p or min-p border is too close to call."""
    scores = adjusted(logits, row)
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if row.temperature == 0:
        return Expectation(frozenset(order[:1]), tuple(order[:1]))
    temperature, top_p, min_p = (float(np.float32(x)) for x in (row.temperature, row.top_p, row.min_p))
    scaled = {token: scores[token] / temperature for token in order}
    odds = {token: math.exp(scaled[token] - scaled[order[0]]) for token in order}
    kept = order[: row.top_k] if row.top_k else order
    if top_p < 1:
        total, reached = math.fsum(odds[token] for token in kept), 0.0
        prefix: list[int] = []
        for token in kept:
            if prefix and abs(reached / total - top_p) < slack:
                return None
            if prefix and reached / total >= top_p:
                break
            prefix.append(token)
            reached += odds[token]
        kept = prefix
    if min_p > 0:
        if any(odds[token] != 1 and abs(odds[token] / min_p - 1) < slack for token in kept):
            return None
        kept = [token for token in kept if odds[token] >= min_p]
    numbers = uniforms(row.seed, row.position, torch.tensor(kept)).double().tolist()
    noisy = {token: scaled[token] - math.log(-math.log(u)) for token, u in zip(kept, numbers, strict=True)}
    best = max(noisy.values())
    close = slack * (1 + abs(best))
    return Expectation(frozenset(token for token, value in noisy.items() if value > best - close), tuple(kept))
