"""Logprobs of prompt tokens: which of a step's hidden states they need, and the numbers, in bounded slices.

The hidden state at position i gives the logprob of the token at i + 1, so a chunk that computes prompt positions
[a, b) yields those of tokens a + 1 ... b, as far as they belong to the prompt and were asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.api import Logprobs
from worker_svc.outcome import TokenLogprobs
from worker_svc.output_head import OutputHead
from worker_svc.rows import Int64Array, RowTable
from worker_svc.sampling import SamplingTable

# Rows of logits alive at once: a long prompt over a large vocabulary would otherwise take gigabytes.
SLICE_ROWS = 32


@dataclass(frozen=True)
class WantedStretch:
    """Row `row` of the step wants the logprobs of `num_tokens` prompt tokens from position `start`."""

    row: int
    start: int
    num_tokens: int
    num_top: int


@dataclass(frozen=True)
class WantedPrompt:
    """A step's stretches, and for all their tokens in order: the step's token whose hidden state is needed, the id."""

    stretches: tuple[WantedStretch, ...]
    token_indexes: Int64Array
    target_ids: Int64Array


_NOTHING_WANTED = WantedPrompt((), np.zeros(0, np.int64), np.zeros(0, np.int64))


def wanted_prompt(rows: RowTable, sampling: SamplingTable, slots: Int64Array, counts: Int64Array) -> WantedPrompt:
    """What the step that computes `counts` more tokens of each row owes its rows; before it is committed."""
    if not sampling.wants_prompt_logprobs[slots].any():
        return _NOTHING_WANTED
    query_starts = np.cumsum(counts) - counts
    stretches: list[WantedStretch] = []
    token_indexes: list[Int64Array] = []
    target_ids: list[Int64Array] = []
    for row in np.flatnonzero(sampling.wants_prompt_logprobs[slots]).tolist():
        slot = int(slots[row])
        request = sampling[slot].prompt_logprobs
        computed = int(rows.num_computed_tokens[slot])
        start = max(computed + 1, request.start if request is not None else 0)
        end = min(computed + int(counts[row]), int(rows.num_prompt_tokens[slot]) - 1) + 1
        if request is None or start >= end:
            continue
        stretches.append(WantedStretch(row, start, end - start, min(request.num_top, rows.limits.vocab_size)))
        token_indexes.append(np.arange(start, end) - 1 - computed + query_starts[row])
        target_ids.append(rows.token_ids[slot, start:end].astype(np.int64))
    if not stretches:
        return _NOTHING_WANTED
    return WantedPrompt(tuple(stretches), np.concatenate(token_indexes), np.concatenate(target_ids))


def compute_prompt_logprobs(
    head: OutputHead, hidden: Tensor, wanted: WantedPrompt, vocab_size: int
) -> list[TokenLogprobs]:
    """One entry per stretch, from the hidden states [tokens of all stretches, hidden_size] in their order."""
    if not wanted.stretches:
        return []
    num_top = max(stretch.num_top for stretch in wanted.stretches)
    targets = torch.from_numpy(wanted.target_ids).to(hidden.device)
    slices = [
        head.logprobs(hidden[first : first + SLICE_ROWS], targets[first : first + SLICE_ROWS], num_top, vocab_size)
        for first in range(0, len(targets), SLICE_ROWS)
    ]
    whole = Logprobs(
        torch.cat([part.token_logprobs for part in slices]),
        torch.cat([part.top_ids for part in slices]),
        torch.cat([part.top_logprobs for part in slices]),
    )
    found: list[TokenLogprobs] = []
    first = 0
    for stretch in wanted.stretches:
        found.append(cut_logprobs(whole, slice(first, first + stretch.num_tokens), stretch.num_top))
        first += stretch.num_tokens
    return found


def cut_logprobs(logprobs: Logprobs, rows: slice, num_top: int) -> TokenLogprobs:
    """The numbers of some rows, with the first `num_top` alternatives of each."""
    return TokenLogprobs(
        tokens=logprobs.token_logprobs[rows].cpu().numpy(),
        top_ids=logprobs.top_ids[rows, :num_top].cpu().numpy().astype(np.int64),
        top=logprobs.top_logprobs[rows, :num_top].cpu().numpy(),
    )
