"""Logprobs of given tokens and of the likeliest, for the rows that want them: parts of a row, then the row.

Knows raw logits; adjusts and chooses nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.api import Logprobs
from kernels.contracts import check_num_top
from kernels.triton.launch import UNFUSED
from kernels.triton.sampling_numbers import NO_ID

MAX_ALTERNATIVES = 256
_PART = 4096
# Alternatives that the last kernel is compiled for: the fewest of these that are enough.
_ALTERNATIVES = (1, 8, 32, MAX_ALTERNATIVES)
# Places that change from call to call: no reason to compile anew.
_POINTERS = ["ROWS", "MAXIMA", "SUMS", "VALUES", "IDS"]
_RESULTS = ["TOKENS", "TOKEN_LOGPROBS", "TOP_IDS", "TOP_LOGPROBS"]


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=_POINTERS)
def _scan_logprobs(
    LOGITS, ROWS, MAXIMA, SUMS, VALUES, IDS, stride, vocab, num_top, PICKS: tl.constexpr, PART: tl.constexpr
):
    """A program per wanted row and part: its maximum, its sum of exponentials, its likeliest tokens in order."""
    wanted = tl.program_id(0)
    part = tl.program_id(1)
    place = wanted * tl.num_programs(1) + part
    row = wanted
    if PICKS:
        row = tl.load(ROWS + wanted)
    ids = part * PART + tl.arange(0, PART)
    inside = ids < vocab
    x = tl.load(LOGITS + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))
    maximum = tl.max(x, 0)
    tl.store(MAXIMA + place, maximum)
    tl.store(SUMS + place, tl.sum(tl.where(inside, tl.exp(x - maximum), 0.0), 0))
    left = inside
    for rank in range(num_top):
        ahead = tl.max(tl.where(left, x, float("-inf")), 0)
        leader = tl.min(tl.where(left & (x == ahead), ids, NO_ID), 0)
        tl.store(VALUES + place.to(tl.int64) * num_top + rank, ahead)
        tl.store(IDS + place.to(tl.int64) * num_top + rank, leader)
        left = left & (ids != leader)


@triton.jit(do_not_specialize=["num_top"], do_not_specialize_on_alignment=[*_POINTERS, *_RESULTS])
def _join_logprobs(
    LOGITS,
    ROWS,
    TOKENS,
    MAXIMA,
    SUMS,
    VALUES,
    IDS,
    TOKEN_LOGPROBS,
    TOP_IDS,
    TOP_LOGPROBS,
    stride,
    num_parts,
    num_top,
    PICKS: tl.constexpr,
    PARTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """A program per wanted row."""
    wanted = tl.program_id(0)
    row = wanted
    if PICKS:
        row = tl.load(ROWS + wanted)
    parts = tl.arange(0, PARTS)
    here = parts < num_parts
    maxima = tl.load(MAXIMA + wanted * num_parts + parts, mask=here, other=float("-inf"))
    sums = tl.load(SUMS + wanted * num_parts + parts, mask=here, other=0.0)
    maximum = tl.max(maxima, 0)
    log_sum = tl.log(tl.sum(sums * tl.exp(maxima - maximum), 0))
    token = tl.load(TOKENS + row)
    logit = tl.load(LOGITS + row.to(tl.int64) * stride + token).to(tl.float32)
    tl.store(TOKEN_LOGPROBS + wanted, (logit - maximum) - log_sum)
    candidate = tl.arange(0, CANDIDATES)
    left = candidate < num_parts * num_top
    first = wanted.to(tl.int64) * num_parts * num_top
    values = tl.load(VALUES + first + candidate, mask=left, other=float("-inf"))
    ids = tl.load(IDS + first + candidate, mask=left, other=NO_ID)
    left = left & (ids < NO_ID)
    for rank in range(num_top):
        ahead = tl.max(tl.where(left, values, float("-inf")), 0)
        leader = tl.min(tl.where(left & (values == ahead), ids, NO_ID), 0)
        tl.store(TOP_IDS + wanted * num_top + rank, leader)
        tl.store(TOP_LOGPROBS + wanted * num_top + rank, (ahead - maximum) - log_sum)
        left = left & (ids != leader)


def logprobs(logits: Tensor, rows: Tensor | None, tokens: Tensor, num_top: int, vocab_size: int) -> Logprobs:
    """Of `tokens` [number of logits' rows] int64, for `rows` (int32; None: all). Raises ValueError for num_top."""
    check_num_top(num_top, min(vocab_size, MAX_ALTERNATIVES))
    count = logits.shape[0] if rows is None else len(rows)
    part = min(_PART, triton.next_power_of_2(vocab_size))
    num_parts = triton.cdiv(vocab_size, part)
    floats = torch.empty((count, num_parts, 2 + num_top), dtype=torch.float32, device=logits.device).view(-1)
    maxima, sums, values = floats.split([count * num_parts, count * num_parts, count * num_parts * num_top])
    ids = torch.empty((count, num_parts, num_top), dtype=torch.int32, device=logits.device)
    result = Logprobs(
        torch.empty(count, dtype=torch.float32, device=logits.device),
        torch.empty((count, num_top), dtype=torch.int32, device=logits.device),
        torch.empty((count, num_top), dtype=torch.float32, device=logits.device),
    )
    if count == 0:
        return result
    picked = tokens if rows is None else rows
    candidates = triton.next_power_of_2(num_parts * next(n for n in _ALTERNATIVES if n >= num_top))
    _scan_logprobs[(count, num_parts)](
        logits,
        picked,
        maxima,
        sums,
        values,
        ids,
        logits.stride(0),
        vocab_size,
        num_top,
        PICKS=rows is not None,
        PART=part,
        num_warps=8,
        **UNFUSED,
    )
    _join_logprobs[(count,)](
        logits,
        picked,
        tokens,
        maxima,
        sums,
        values,
        ids,
        result.token_logprobs,
        result.top_ids,
        result.top_logprobs,
        logits.stride(0),
        num_parts,
        num_top,
        PICKS=rows is not None,
        PARTS=triton.next_power_of_2(num_parts),
        CANDIDATES=candidates,
        num_warps=min(16, max(4, candidates // 2048)),
        **UNFUSED,
    )
    return result
