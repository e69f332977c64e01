"""The next token of each row, and logprobs: which kernels a step's sampling launches.

Knows tensors and their sizes; reads nothing back. Launches depend on the batch's padded size, the vocabulary and the
sizes of the ragged lists, so sampling can be captured in a CUDA graph. A row's choice depends on nothing but the row.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

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


def sample(logits: Tensor, batch: SamplingBatch) -> Samples:
    """One token per row of [B, padded_vocab], any float dtype. Raises ValueError for shapes that do not fit."""
    logits = _checked(logits, batch.vocab_size)
    rows, vocab = logits.shape[0], batch.vocab_size
    if len(batch.temperatures) != rows:
        raise ValueError(f"the batch is of {len(batch.temperatures)} rows, logits of {rows}")
    device = logits.device
    scores = adjusted_scores(logits, batch)
    part = min(_PART, triton.next_power_of_2(vocab))
    num_parts = triton.cdiv(vocab, part)
    tops = torch.empty((rows, num_parts), dtype=torch.float32, device=device)
    draws = torch.empty((rows, num_parts), dtype=torch.float64, device=device)
    ids = torch.empty((3, rows, num_parts), dtype=torch.int32, device=device)
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    finite = torch.empty(rows, dtype=torch.bool, device=device)
    row_arguments = (
        logits,
        tops if scores is None else scores,
        batch.temperatures,
        batch.top_ks,
        batch.top_ps,
        batch.min_ps,
        batch.seeds,
        batch.positions,
        batch.history_starts,
        batch.bias_starts,
        batch.forbidden_starts,
        tops,
        draws,
        ids,
    )
    stride, adjusts, parts = logits.stride(0), scores is not None, triton.next_power_of_2(num_parts)
    scan_parts[(rows, num_parts)](*row_arguments, stride, vocab, ADJUSTS=adjusts, PART=part, num_warps=8, **UNFUSED)
    tile = min(_TILE, triton.next_power_of_2(vocab))
    draw_truncated[(rows,)](
        *row_arguments,
        torch.empty((rows, _RANKED), dtype=torch.int64, device=device),
        stride,
        vocab,
        num_parts,
        ADJUSTS=adjusts,
        PARTS=parts,
        TILE=tile,
        RANKED=_RANKED,
        num_warps=8,
        **UNFUSED,
    )
    choose_of_parts[(rows,)](
        tops,
        draws,
        ids,
        batch.temperatures,
        token_ids,
        finite.view(torch.int8),
        num_parts,
        PARTS=parts,
        num_warps=4,
        **UNFUSED,
    )
    wanted = batch.logprob_rows
    if not len(wanted):
        return Samples(token_ids, finite, None)
    chosen = sampling_logprobs.logprobs(logits, wanted, token_ids, batch.num_top, vocab)
    return Samples(token_ids, finite, chosen)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int, vocab_size: int) -> Logprobs:
    """Of given tokens [L] under the rows of [L, padded_vocab]. Raises ValueError for num_top or shapes."""
    if token_ids.shape != logits.shape[:1]:
        raise ValueError(f"token_ids is {tuple(token_ids.shape)} for {logits.shape[0]} rows of logits")
    return sampling_logprobs.logprobs(_checked(logits, vocab_size), None, token_ids, num_top, vocab_size)


def _checked(logits: Tensor, vocab_size: int) -> Tensor:
    if logits.dim() != 2 or not 0 < vocab_size <= logits.shape[1]:
        raise ValueError(f"logits is {tuple(logits.shape)}, must be [rows, at least the vocabulary's {vocab_size}]")
    return logits if logits.stride(1) == 1 else logits.contiguous()
