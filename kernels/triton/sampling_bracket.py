"""Where a truncated row is cut: the pass over the row that narrows a bracket of orders down.

Knows one row's scores and one limit, top-k or top-p; knows no batch and draws nothing. See sampling_truncate.py for
what a bracket is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling_numbers import load_scores, order_of

_PIVOTS = tl.constexpr(4)


@triton.jit
def is_kept(order, ids, border_order, border_id):
    """Whether tokens come before the border's successor: kept so far."""
    return (order > border_order) | ((order == border_order) & (ids <= border_id))


@triton.jit
def load_tile(logits, scores, adjusted, first, vocab, TILE: tl.constexpr):
    """The ids from `first` on, whether they are in the row, and their scores."""
    ids = first + tl.arange(0, TILE)
    inside = ids < vocab
    return ids, inside, load_scores(logits, scores, 0, 0, adjusted, ids, inside)


@triton.jit
def _pass_over_row(
    logits, scores, adjusted, vocab, top, rate, border_order, border_id, low, high, pivot, TILE: tl.constexpr
):
    """Of the kept tokens: how many reach each pivot and their odds; all their odds; the least and the greatest order
    in the bracket [low, high)."""
    counts = tl.zeros([_PIVOTS], tl.int32)
    masses = tl.zeros([_PIVOTS], tl.float64)
    total = tl.full((), 0.0, tl.float64)
    least = high
    most = low - 1
    for first in range(0, vocab, TILE):
        ids, inside, x = load_tile(logits, scores, adjusted, first, vocab, TILE)
        order = order_of(x)
        kept = inside & is_kept(order, ids, border_order, border_id)
        odds = tl.where(kept, tl.exp2((x - top) * rate), 0.0)
        total += tl.sum(odds, 0).to(tl.float64)
        wide = order.to(tl.int64)
        within = kept & (wide >= low) & (wide < high)
        least = tl.minimum(least, tl.min(tl.where(within, wide, high), 0))
        most = tl.maximum(most, tl.max(tl.where(within, wide, low - 1), 0))
        reaches = kept[None, :] & (wide[None, :] >= pivot[:, None])
        counts += tl.sum(reaches.to(tl.int32), 1)
        masses += tl.sum(tl.where(reaches, odds[None, :], 0.0), 1).to(tl.float64)
    return counts, masses, total, least, most


@triton.jit
def find_bracket(
    logits,
    scores,
    adjusted,
    vocab,
    top,
    temperature,
    rate,
    border_order,
    border_id,
    by_count,
    top_k,
    top_p,
    TILE: tl.constexpr,
    RANKED: tl.constexpr,
):
    """Orders [low, high) that hold the limit's border and at most RANKED kept tokens or one number; how many kept
    tokens lie above and their odds; the odds that top-p wants."""
    low = tl.full((), -0x80000000, tl.int64)
    high = order_of(top).to(tl.int64) + 1
    low_count = vocab
    high_count = 0
    high_mass = tl.full((), 0.0, tl.float64)
    wanted_mass = tl.full((), 0.0, tl.float64)
    pivots = tl.arange(0, _PIVOTS)
    passes = 0
    while (passes == 0) | ((low_count - high_count > RANKED) & (high - low > 1)):
        # 2, 6, 14 and 30 units of the temperature below the likeliest; then fifths of the bracket.
        distances = (4 << pivots).to(tl.float32) - 2.0
        pivot = order_of(top - distances * temperature).to(tl.int64)
        if passes > 0:
            pivot = low + (high - low) * (pivots + 1) // (_PIVOTS + 1)
        counts, masses, total, least, most = _pass_over_row(
            logits, scores, adjusted, vocab, top, rate, border_order, border_id, low, high, pivot, TILE
        )
        if passes == 0:
            wanted_mass = top_p * total
        enough = (counts >= top_k) if by_count else (masses >= wanted_mass)
        usable = (pivot > low) & (pivot < high)
        new_low = tl.max(tl.where(enough & usable, pivot, low), 0)
        new_high = tl.min(tl.where((enough == 0) & usable, pivot, high), 0)
        low_count = tl.minimum(low_count, tl.min(tl.where(enough & usable, counts, vocab), 0))
        high_count = tl.maximum(high_count, tl.max(tl.where((enough == 0) & usable, counts, 0), 0))
        below = tl.where((enough == 0) & usable, masses, 0.0)
        high_mass = tl.maximum(high_mass, tl.max(below, 0))
        # A bracket of one number is that number.
        low = tl.where(least == most, least, new_low)
        high = tl.where(least == most, least + 1, new_high)
        passes += 1
    return low, high, high_count, high_mass, wanted_mass
