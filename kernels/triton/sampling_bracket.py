"""Where a truncated row is cut: the pass over the row that narrows a bracket of orders down.

Knows one row's scores and one limit, top-k or top-p; knows no batch and draws nothing. See sampling_truncate.py for
what a bracket is.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from kernels.triton.sampling_numbers import load_scores, order_of

_PIVOTS = tl.constexpr(4)


class Row(NamedTuple):
    """A row of logits and what is known of it."""

    # Pointers to its logits and, where penalties or bias make others of them, to its scores.
    logits: tl.tensor
    scores: tl.tensor
    adjusted: tl.tensor
    vocab: tl.tensor
    # The highest score; temperature, and log2(e) over it.
    top: tl.tensor
    temperature: tl.tensor
    rate: tl.tensor


class Border(NamedTuple):
    """The last token that is kept so far."""

    order: tl.tensor
    token: tl.tensor


class Limit(NamedTuple):
    """What the border is sought for: so many tokens, or so much of all odds."""

    by_count: tl.tensor
    top_k: tl.tensor
    top_p: tl.tensor


class Bracket(NamedTuple):
    """Orders [low, high) that hold the border; how many kept tokens lie above, their odds, and the odds wanted."""

    low: tl.tensor
    high: tl.tensor
    high_count: tl.tensor
    high_mass: tl.tensor
    wanted_mass: tl.tensor


@triton.jit
def load_kept(row, border, first, TILE: tl.constexpr):
    """The ids from `first` on, their scores and orders, and whether they are kept so far."""
    ids = first + tl.arange(0, TILE)
    inside = ids < row.vocab
    x = load_scores(row.logits, row.scores, 0, 0, row.adjusted, ids, inside)
    order = order_of(x)
    before = (order > border.order) | ((order == border.order) & (ids <= border.token))
    return ids, x, order, inside & before


@triton.jit
def odds_of(row, score):
    """The likelihood of tokens over the likeliest's."""
    return tl.exp2((score - row.top) * row.rate)


@triton.jit
def _pass_over_row(row, border, low, high, pivot, TILE: tl.constexpr):
    """Of the kept tokens: how many reach each pivot and their odds; all their odds; the least and the greatest order
    in the bracket [low, high)."""
    counts = tl.zeros([_PIVOTS], tl.int32)
    masses = tl.zeros([_PIVOTS], tl.float64)
    total = tl.full((), 0.0, tl.float64)
    least = high
    most = low - 1
    for first in range(0, row.vocab, TILE):
        _, x, order, kept = load_kept(row, border, first, TILE)
        odds = tl.where(kept, odds_of(row, x), 0.0)
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
def find_bracket(row, border, limit, TILE: tl.constexpr, RANKED: tl.constexpr):
    """The bracket of the limit's border, with at most RANKED kept tokens or one number in it."""
    low = tl.full((), -0x80000000, tl.int64)
    high = order_of(row.top).to(tl.int64) + 1
    low_count = row.vocab
    high_count = 0
    high_mass = tl.full((), 0.0, tl.float64)
    wanted_mass = tl.full((), 0.0, tl.float64)
    pivots = tl.arange(0, _PIVOTS)
    passes = 0
    while (passes == 0) | ((low_count - high_count > RANKED) & (high - low > 1)):
        # 2, 6, 14 and 30 units of the temperature below the likeliest; then fifths of the bracket.
        distances = (4 << pivots).to(tl.float32) - 2.0
        pivot = order_of(row.top - distances * row.temperature).to(tl.int64)
        if passes > 0:
            pivot = low + (high - low) * (pivots + 1) // (_PIVOTS + 1)
        counts, masses, total, least, most = _pass_over_row(row, border, low, high, pivot, TILE)
        if passes == 0:
            wanted_mass = limit.top_p * total
        enough = (counts >= limit.top_k) if limit.by_count else (masses >= wanted_mass)
        usable = (pivot > low) & (pivot < high)
        new_low = tl.max(tl.where(enough & usable, pivot, low), 0)
        new_high = tl.min(tl.where((enough == 0) & usable, pivot, high), 0)
        low_count = tl.minimum(low_count, tl.min(tl.where(enough & usable, counts, row.vocab), 0))
        high_count = tl.maximum(high_count, tl.max(tl.where((enough == 0) & usable, counts, 0), 0))
        below = tl.where((enough == 0) & usable, masses, 0.0)
        high_mass = tl.maximum(high_mass, tl.max(below, 0))
        # A bracket of one number is that number.
        low = tl.where(least == most, least, new_low)
        high = tl.where(least == most, least + 1, new_high)
        passes += 1
    return Bracket(low, high, high_count, high_mass, wanted_mass)
