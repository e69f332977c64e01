"""Rows with top-k, top-p or min-p: where their order is cut, without sorting the row, and the draw above the cut.

A program per row; one of a row that asks for none of the three ends at once. Tokens are ordered by (logit descending,
id ascending), so what top-k and then top-p keep ends at one token, the border:

    likeliest                                                                         least likely
    |---------- surely kept ----------|------------- bracket -------------|--------------------|
                                    `high`                              `low`

A pass over the row counts, and sums probabilities, above a few pivots in the bracket, which becomes what lies between
two of them: first by distance from the likeliest, then by the bits of the logits. When few enough tokens are in it they
are gathered and ranked; when one number is all that it holds, its tokens are counted by id.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.penalties import is_adjusted
from kernels.triton.sampling_draw import BATCH_POINTERS, is_truncated
from kernels.triton.sampling_numbers import (
    GUMBEL_RANGE,
    NO_ID,
    best_draw,
    load_scores,
    number_of,
    order_of,
    uniform_key,
)

_PIVOTS = tl.constexpr(4)
_COMPARED = tl.constexpr(16)
# Below every token, as order and id packed into one int64.
_NOTHING = tl.constexpr(-0x8000000000000000)


@triton.jit
def _above(order, ids, border_order, border_id):
    """Whether tokens come before the border's successor: kept so far."""
    return (order > border_order) | ((order == border_order) & (ids <= border_id))


@triton.jit
def _tile(logits, scores, adjusted, first, vocab, TILE: tl.constexpr):
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
        ids, inside, x = _tile(logits, scores, adjusted, first, vocab, TILE)
        order = order_of(x)
        kept = inside & _above(order, ids, border_order, border_id)
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
def _bracket(
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


@triton.jit
def _gather(
    logits,
    scores,
    adjusted,
    vocab,
    border_order,
    border_id,
    low,
    high,
    gathered_at,
    TILE: tl.constexpr,
    RANKED: tl.constexpr,
):
    """Stores the bracket's kept tokens, order and id packed so that greater is likelier; how many they are."""
    gathered = 0
    for first in range(0, vocab, TILE):
        ids, inside, x = _tile(logits, scores, adjusted, first, vocab, TILE)
        order = order_of(x)
        wide = order.to(tl.int64)
        within = inside & _above(order, ids, border_order, border_id) & (wide >= low) & (wide < high)
        if tl.max(within.to(tl.int32), 0) > 0:
            place = gathered + tl.cumsum(within.to(tl.int32), 0) - 1
            packed = (wide << 32) | (ids ^ NO_ID).to(tl.int64)
            tl.store(gathered_at + place, packed, mask=within & (place < RANKED))
            gathered += tl.sum(within.to(tl.int32), 0)
    return gathered


@triton.jit
def _border_by_rank(
    gathered_at, gathered, top, rate, by_count, top_k, high_count, high_mass, wanted_mass, RANKED: tl.constexpr
):
    """The last kept token of those gathered: order and id. A few hundred are ranked sooner by comparing each with each
    than by sorting."""
    number = tl.arange(0, RANKED)
    packed = tl.load(gathered_at + number, mask=number < gathered, other=_NOTHING)
    rank = tl.zeros([RANKED], tl.int32)
    before = tl.zeros([RANKED], tl.float64)
    for first in range(0, gathered, _COMPARED):
        others = first + tl.arange(0, _COMPARED)
        other = tl.load(gathered_at + others, mask=others < gathered, other=_NOTHING)
        odds_of_other = tl.exp2((number_of((other >> 32).to(tl.int32)) - top) * rate).to(tl.float64)
        precedes = other[None, :] > packed[:, None]
        rank += tl.sum(precedes.to(tl.int32), 1)
        before += tl.sum(tl.where(precedes, odds_of_other[None, :], 0.0), 1)
    keeps = (rank < top_k - high_count) if by_count else (high_mass + before < wanted_mass)
    keeps = (keeps | (rank == 0)) & (number < gathered)
    last = tl.min(tl.where(keeps, packed, 0x7FFFFFFFFFFFFFFF), 0)
    return (last >> 32).to(tl.int32), (last & 0x7FFFFFFF).to(tl.int32) ^ NO_ID


@triton.jit
def _border_among_ties(
    logits,
    scores,
    adjusted,
    vocab,
    top,
    rate,
    border_order,
    border_id,
    number,
    by_count,
    top_k,
    high_count,
    high_mass,
    wanted_mass,
    TILE: tl.constexpr,
):
    """The id of the last kept token of those whose order is `number`, counted by id."""
    odds_each = tl.exp2((number_of(number) - top) * rate).to(tl.float64)
    seen = 0
    new_id = border_id
    for first in range(0, vocab, TILE):
        ids, inside, x = _tile(logits, scores, adjusted, first, vocab, TILE)
        order = order_of(x)
        tied = inside & _above(order, ids, border_order, border_id) & (order == number)
        nth = seen + tl.cumsum(tied.to(tl.int32), 0)
        before = high_mass + (nth - 1).to(tl.float64) * odds_each
        keeps = (nth <= top_k - high_count) if by_count else (before < wanted_mass)
        keeps = (keeps | (nth == 1)) & tied
        new_id = tl.where(seen == 0, -1, new_id)
        new_id = tl.maximum(new_id, tl.max(tl.where(keeps, ids, -1), 0))
        seen += tl.sum(tied.to(tl.int32), 0)
    return new_id


@triton.jit
def _draw_above(
    logits, scores, adjusted, vocab, top, temperature, border_order, border_id, key, min_p, TILE: tl.constexpr
):
    """The best draw of the tokens up to the border: value and id."""
    best = tl.full((), float("-inf"), tl.float64)
    best_id = tl.full((), 0x7FFFFFFF, tl.int32)
    for first in range(0, vocab, TILE):
        ids, inside, x = _tile(logits, scores, adjusted, first, vocab, TILE)
        kept = inside & _above(order_of(x), ids, border_order, border_id)
        if (tl.max(x, 0) - top) / temperature > -GUMBEL_RANGE:
            value, token = best_draw(x, ids, kept, key, temperature, top, min_p)
            better = (value > best) | ((value == best) & (token < best_id))
            best = tl.where(better, value, best)
            best_id = tl.where(better, token, best_id)
    return best, best_id


@triton.jit(do_not_specialize_on_alignment=BATCH_POINTERS)
def draw_truncated(
    LOGITS,
    SCORES,
    TEMPERATURES,
    TOP_KS,
    TOP_PS,
    MIN_PS,
    SEEDS,
    POSITIONS,
    HISTORY_STARTS,
    BIAS_STARTS,
    FORBIDDEN_STARTS,
    TOPS,
    DRAWS,
    IDS,
    GATHERED,
    stride,
    vocab,
    num_parts,
    ADJUSTS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    RANKED: tl.constexpr,
):
    """Stores the row's draw in its first part of DRAWS and IDS. GATHERED [B, RANKED] int64 is scratch."""
    row = tl.program_id(0)
    temperature = tl.load(TEMPERATURES + row)
    parts = tl.arange(0, PARTS)
    top = tl.max(tl.load(TOPS + row * num_parts + parts, mask=parts < num_parts, other=float("-inf")), 0)
    drawn = (temperature > 0.0) & (tl.abs(top) < float("inf"))
    if drawn & is_truncated(TOP_KS, TOP_PS, MIN_PS, row, vocab):
        adjusted = False
        if ADJUSTS:
            adjusted = is_adjusted(HISTORY_STARTS, BIAS_STARTS, FORBIDDEN_STARTS, row)
        logits = LOGITS + row.to(tl.int64) * stride
        scores = SCORES + row.to(tl.int64) * vocab
        gathered_at = GATHERED + row * RANKED
        rate = 1.4426950408889634 / temperature
        top_k = tl.load(TOP_KS + row)
        top_p = tl.load(TOP_PS + row).to(tl.float64)
        border_order = tl.full((), -0x80000000, tl.int32)
        border_id = tl.full((), 0x7FFFFFFF, tl.int32)
        for limit in range(2):
            by_count = limit == 0
            asks = tl.where(by_count, (top_k > 0) & (top_k < vocab), top_p < 1.0)
            if asks:
                low, high, high_count, high_mass, wanted_mass = _bracket(
                    logits, scores, adjusted, vocab, top, temperature, rate, border_order, border_id,
                    by_count, top_k, top_p, TILE, RANKED,
                )  # fmt: skip
                if high - low > 1:
                    gathered = _gather(
                        logits, scores, adjusted, vocab, border_order, border_id, low, high, gathered_at, TILE, RANKED
                    )
                    tl.debug_barrier()
                    border_order, border_id = _border_by_rank(
                        gathered_at, gathered, top, rate, by_count, top_k, high_count, high_mass, wanted_mass, RANKED
                    )
                    tl.debug_barrier()
                else:
                    number = low.to(tl.int32)
                    border_id = _border_among_ties(
                        logits, scores, adjusted, vocab, top, rate, border_order, border_id,
                        number, by_count, top_k, high_count, high_mass, wanted_mass, TILE,
                    )  # fmt: skip
                    border_order = number
        key = uniform_key(tl.load(SEEDS + row), tl.load(POSITIONS + row))
        best, best_id = _draw_above(
            logits, scores, adjusted, vocab, top, temperature, border_order, border_id,
            key, tl.load(MIN_PS + row), TILE,
        )  # fmt: skip
        tl.store(DRAWS + row * num_parts, best)
        tl.store(IDS + (tl.num_programs(0) + row) * num_parts, best_id)
