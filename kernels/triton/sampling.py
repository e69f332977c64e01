"""The next token of each row, and logprobs: which kernels a step's sampling launches.

Knows tensors and their sizes; reads nothing back. Launches depend on the batch's padded size, the vocabulary and the
sizes of the ragged lists, so sampling can be captured in a CUDA graph. A row's choice depends on nothing but the row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from kernels import contracts
from kernels.api import Logprobs, Samples, SamplingBatch
from kernels.triton import sampling_logprobs
from kernels.triton.launch import UNFUSED
from kernels.triton.penalties import adjusted_scores
from kernels.triton.sampling_draw import choose_of_parts, scan_parts
from kernels.triton.sampling_truncate import draw_truncated

# Tokens of a part of a row; what a bracket may hold to be ranked.
_PART = 4096
_TILE = 2048
_RANKED = 512
# All that 8 warps can have: left to itself, the compiler spills to fit more rows than there are.
_MOST_REGISTERS = 255


@dataclass(frozen=True)
class _Parts:
    """What is known of each part of each row, [B, parts]: the highest score, fp32, and the best draw, fp64; int32 ids
    [3, B, parts] of the two, and whether all logits are finite."""

    tops: Tensor
    draws: Tensor
    ids: Tensor


def sample(logits: Tensor, batch: SamplingBatch) -> Samples:
    """One token per row of [B, padded_vocab], any float dtype. Raises ValueError for shapes that do not fit."""
    logits = _checked(logits, batch.vocab_size)
    rows = logits.shape[0]
    if len(batch.temperatures) != rows:
        raise ValueError(f"the batch is of {len(batch.temperatures)} rows, logits of {rows}")
    token_ids, finite = _choices(_draw(logits, adjusted_scores(logits, batch), batch), batch)
    if not len(batch.logprob_rows):
        return Samples(token_ids, finite, None)
    chosen = sampling_logprobs.logprobs(logits, batch.logprob_rows, token_ids, batch.num_top, batch.vocab_size)
    return Samples(token_ids, finite, chosen)


def _draw(logits: Tensor, scores: Tensor | None, batch: SamplingBatch) -> _Parts:
    """Draws from every part of every row, and from the whole of those with top-k, top-p or min-p."""
    rows, vocab, device = logits.shape[0], batch.vocab_size, logits.device
    part = min(_PART, triton.next_power_of_2(vocab))
    num_parts = triton.cdiv(vocab, part)
    parts = _Parts(
        torch.empty((rows, num_parts), dtype=torch.float32, device=device),
        torch.empty((rows, num_parts), dtype=torch.float64, device=device),
        torch.empty((3, rows, num_parts), dtype=torch.int32, device=device),
    )
    row_arguments = (
        logits,
        parts.tops if scores is None else scores,
        batch.temperatures,
        batch.top_ks,
        batch.top_ps,
        batch.min_ps,
        batch.seeds,
        batch.positions,
        batch.history_starts,
        batch.bias_starts,
        batch.forbidden_starts,
        parts.tops,
        parts.draws,
        parts.ids,
    )
    stride, adjusts = logits.stride(0), scores is not None
    scan_parts[(rows, num_parts)](*row_arguments, stride, vocab, ADJUSTS=adjusts, PART=part, num_warps=8, **UNFUSED)
    draw_truncated[(rows,)](
        *row_arguments,
        torch.empty((rows, _RANKED), dtype=torch.int64, device=device),
        stride,
        vocab,
        num_parts,
        ADJUSTS=adjusts,
        PARTS=triton.next_power_of_2(num_parts),
        TILE=min(_TILE, triton.next_power_of_2(vocab)),
        RANKED=_RANKED,
        num_warps=8,
        maxnreg=_MOST_REGISTERS,
        **UNFUSED,
    )
    return parts


def _choices(parts: _Parts, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """The rows' tokens [B] int64, and whether their logits are finite [B] bool."""
    rows, num_parts = parts.tops.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=parts.tops.device)
    finite = torch.empty(rows, dtype=torch.bool, device=parts.tops.device)
    choose_of_parts[(rows,)](
        parts.tops,
        parts.draws,
        parts.ids,
        batch.temperatures,
        token_ids,
        finite.view(torch.int8),
        num_parts,
        PARTS=triton.next_power_of_2(num_parts),
        num_warps=4,
        **UNFUSED,
    )
    return token_ids, finite


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int, vocab_size: int) -> Logprobs:
    """Of given tokens [L] under the rows of [L, padded_vocab]. Raises ValueError for num_top or shapes."""
    contracts.check_token_ids(token_ids, logits)
    return sampling_logprobs.logprobs(_checked(logits, vocab_size), None, token_ids, num_top, vocab_size)


def _checked(logits: Tensor, vocab_size: int) -> Tensor:
    contracts.check_logits(logits, vocab_size)
    return logits if logits.stride(1) == 1 else logits.contiguous()
