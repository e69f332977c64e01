"""Bias, penalties, forbidden ids: the adjusted scores of the rows that have any, fp32, beside the logits.

Knows histories and lists of ids; chooses nothing. A program counts a history's tokens in its own part of the
vocabulary, so no counts are kept anywhere and no order decides anything. Rows without adjustments are neither read nor
written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.api import SamplingBatch
from kernels.triton.launch import UNFUSED
from kernels.triton.sampling_numbers import load_scores

_IDS = 1024
_HISTORY = 1024
_FORBIDDING_PROGRAMS = 8
# The tensors of a SamplingBatch lie where they lie: their places are no reason to compile anew.
_POINTERS = [
    "REPETITION",
    "FREQUENCY",
    "PRESENCE",
    "HISTORY_STARTS",
    "HISTORY",
    "PROMPT_LENS",
    "BIAS_STARTS",
    "BIAS_IDS",
    "BIAS_VALUES",
    "FORBIDDEN_STARTS",
]


@triton.jit
def is_adjusted(HISTORY_STARTS, BIAS_STARTS, FORBIDDEN_STARTS, row):
    """Whether a row's scores are not its logits."""
    history = tl.load(HISTORY_STARTS + row + 1) - tl.load(HISTORY_STARTS + row)
    bias = tl.load(BIAS_STARTS + row + 1) - tl.load(BIAS_STARTS + row)
    forbidden = tl.load(FORBIDDEN_STARTS + row + 1) - tl.load(FORBIDDEN_STARTS + row)
    return (history > 0) | (bias > 0) | (forbidden > 0)


@triton.jit(do_not_specialize_on_alignment=_POINTERS)
def _adjust(
    LOGITS,
    SCORES,
    REPETITION,
    FREQUENCY,
    PRESENCE,
    HISTORY_STARTS,
    HISTORY,
    PROMPT_LENS,
    BIAS_STARTS,
    BIAS_IDS,
    BIAS_VALUES,
    FORBIDDEN_STARTS,
    stride,
    vocab,
    IDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """A program per row and part of the vocabulary."""
    row = tl.program_id(0)
    if is_adjusted(HISTORY_STARTS, BIAS_STARTS, FORBIDDEN_STARTS, row):
        start = tl.program_id(1) * IDS
        ids = start + tl.arange(0, IDS)
        inside = ids < vocab
        x = load_scores(LOGITS, SCORES, row.to(tl.int64) * stride, 0, False, ids, inside)
        for number in range(tl.load(BIAS_STARTS + row), tl.load(BIAS_STARTS + row + 1)):
            biased = tl.load(BIAS_IDS + number)
            if (biased >= start) & (biased < start + IDS):
                x = tl.where(ids == biased, x + tl.load(BIAS_VALUES + number), x)
        begin = tl.load(HISTORY_STARTS + row)
        end = tl.load(HISTORY_STARTS + row + 1)
        if end > begin:
            output_begin = begin + tl.load(PROMPT_LENS + row)
            seen = tl.zeros([IDS], tl.int32)
            generated = tl.zeros([IDS], tl.int32)
            for first in range(begin, end, CHUNK):
                place = first + tl.arange(0, CHUNK)
                local = tl.load(HISTORY + place, mask=place < end, other=-1) - start
                here = (place < end) & (local >= 0) & (local < IDS)
                local = tl.where(here, local, 0)
                seen += tl.histogram(local, IDS, mask=here)
                generated += tl.histogram(local, IDS, mask=here & (place >= output_begin))
            repetition = tl.load(REPETITION + row)
            repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
            x = tl.where(seen > 0, repeated, x)
            less = (x - generated.to(tl.float32) * tl.load(FREQUENCY + row)) - tl.load(PRESENCE + row)
            x = tl.where(generated > 0, less, x)
        # An infinity less an infinity: not to be chosen.
        x = tl.where(x == x, x, float("-inf"))
        tl.store(SCORES + row.to(tl.int64) * vocab + ids, x, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["FORBIDDEN_STARTS", "FORBIDDEN_IDS"])
def _forbid(SCORES, FORBIDDEN_STARTS, FORBIDDEN_IDS, vocab, CHUNK: tl.constexpr):
    """Programs of a row take the chunks of its list in turn."""
    row = tl.program_id(0)
    begin = tl.load(FORBIDDEN_STARTS + row) + tl.program_id(1) * CHUNK
    end = tl.load(FORBIDDEN_STARTS + row + 1)
    for first in range(begin, end, tl.num_programs(1) * CHUNK):
        place = first + tl.arange(0, CHUNK)
        ids = tl.load(FORBIDDEN_IDS + place, mask=place < end, other=-1)
        here = (ids >= 0) & (ids < vocab)
        tl.store(SCORES + row.to(tl.int64) * vocab + ids, tl.full([CHUNK], float("-inf"), tl.float32), mask=here)


def adjusted_scores(logits: Tensor, batch: SamplingBatch) -> Tensor | None:
    """Scores [B, vocab_size] fp32, filled for rows that have adjustments; None when no list holds an id.

    Whether anything is launched depends on the lists' sizes alone.
    """
    if not (len(batch.history_ids) or len(batch.bias_ids) or len(batch.forbidden_ids)):
        return None
    rows, vocab = logits.shape[0], batch.vocab_size
    scores = torch.empty((rows, vocab), dtype=torch.float32, device=logits.device)
    ids = min(_IDS, triton.next_power_of_2(vocab))
    _adjust[(rows, triton.cdiv(vocab, ids))](
        logits,
        scores,
        batch.repetition_penalties,
        batch.frequency_penalties,
        batch.presence_penalties,
        batch.history_starts,
        batch.history_ids,
        batch.history_prompt_lens,
        batch.bias_starts,
        batch.bias_ids,
        batch.bias_values,
        batch.forbidden_starts,
        logits.stride(0),
        vocab,
        IDS=ids,
        CHUNK=_HISTORY,
        num_warps=4,
        **UNFUSED,
    )
    if len(batch.forbidden_ids):
        _forbid[(rows, _FORBIDDING_PROGRAMS)](
            scores,
            batch.forbidden_starts,
            batch.forbidden_ids,
            vocab,
            CHUNK=_HISTORY,
            num_warps=4,
            **UNFUSED,
        )
    return scores
