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
        logits_row = row.to(tl.int64) * stride
        scores_row = row.to(tl.int64) * vocab
        rate = 1.4426950408889634 / temperature
        top_k = tl.load(TOP_KS + row)
        top_p = tl.load(TOP_PS + row).to(tl.float64)
        border_order = tl.full((), -0x80000000, tl.int32)
        border_id = tl.full((), 0x7FFFFFFF, tl.int32)
        offsets = tl.arange(0, TILE)
        pivots = tl.arange(0, _PIVOTS)
        for limit in range(2):
            by_count = limit == 0
            asks = tl.where(by_count, (top_k > 0) & (top_k < vocab), top_p < 1.0)
            if asks:
                low = tl.full((), -0x80000000, tl.int64)
                high = order_of(top).to(tl.int64) + 1
                low_count = vocab
                high_count = 0
                high_mass = tl.full((), 0.0, tl.float64)
                wanted_mass = tl.full((), 0.0, tl.float64)
                passes = 0
                while (passes == 0) | ((low_count - high_count > RANKED) & (high - low > 1)):
                    # 2, 6, 14 and 30 units of the temperature below the likeliest; then fifths of the bracket.
                    distances = (4 << pivots).to(tl.float32) - 2.0
                    pivot = order_of(top - distances * temperature).to(tl.int64)
                    if passes > 0:
                        pivot = low + (high - low) * (pivots + 1) // (_PIVOTS + 1)
                    counts = tl.zeros([_PIVOTS], tl.int32)
                    masses = tl.zeros([_PIVOTS], tl.float64)
                    total = tl.full((), 0.0, tl.float64)
                    least = high
                    most = low - 1
                    for first in range(0, vocab, TILE):
                        ids = first + offsets
                        inside = ids < vocab
                        x = load_scores(LOGITS, SCORES, logits_row, scores_row, adjusted, ids, inside)
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
                if high - low > 1:
                    # A few hundred are ranked sooner by comparing each with each than by sorting.
                    gathered = 0
                    for first in range(0, vocab, TILE):
                        ids = first + offsets
                        inside = ids < vocab
                        x = load_scores(LOGITS, SCORES, logits_row, scores_row, adjusted, ids, inside)
                        order = order_of(x)
                        wide = order.to(tl.int64)
                        within = inside & _above(order, ids, border_order, border_id) & (wide >= low) & (wide < high)
                        if tl.max(within.to(tl.int32), 0) > 0:
                            place = gathered + tl.cumsum(within.to(tl.int32), 0) - 1
                            packed = (wide << 32) | (ids ^ NO_ID).to(tl.int64)
                            target = GATHERED + row * RANKED + place
                            tl.store(target, packed, mask=within & (place < RANKED))
                            gathered += tl.sum(within.to(tl.int32), 0)
                    tl.debug_barrier()
                    number = tl.arange(0, RANKED)
                    packed = tl.load(GATHERED + row * RANKED + number, mask=number < gathered, other=_NOTHING)
                    rank = tl.zeros([RANKED], tl.int32)
                    before = tl.zeros([RANKED], tl.float64)
                    for first in range(0, gathered, _COMPARED):
                        others = first + tl.arange(0, _COMPARED)
                        other = tl.load(GATHERED + row * RANKED + others, mask=others < gathered, other=_NOTHING)
                        odds_of_other = tl.exp2((number_of((other >> 32).to(tl.int32)) - top) * rate).to(tl.float64)
                        precedes = other[None, :] > packed[:, None]
                        rank += tl.sum(precedes.to(tl.int32), 1)
                        before += tl.sum(tl.where(precedes, odds_of_other[None, :], 0.0), 1)
                    keeps = (rank < top_k - high_count) if by_count else (high_mass + before < wanted_mass)
                    keeps = (keeps | (rank == 0)) & (number < gathered)
                    last = tl.min(tl.where(keeps, packed, 0x7FFFFFFFFFFFFFFF), 0)
                    border_order = (last >> 32).to(tl.int32)
                    border_id = (last & 0x7FFFFFFF).to(tl.int32) ^ NO_ID
                    tl.debug_barrier()
                else:
                    odds_each = tl.exp2((number_of(low.to(tl.int32)) - top) * rate).to(tl.float64)
                    seen = 0
                    new_id = border_id
                    for first in range(0, vocab, TILE):
                        ids = first + offsets
                        inside = ids < vocab
                        x = load_scores(LOGITS, SCORES, logits_row, scores_row, adjusted, ids, inside)
                        order = order_of(x)
                        tied = inside & _above(order, ids, border_order, border_id) & (order == low.to(tl.int32))
                        nth = seen + tl.cumsum(tied.to(tl.int32), 0)
                        before = high_mass + (nth - 1).to(tl.float64) * odds_each
                        keeps = (nth <= top_k - high_count) if by_count else (before < wanted_mass)
                        keeps = (keeps | (nth == 1)) & tied
                        new_id = tl.where(seen == 0, -1, new_id)
                        new_id = tl.maximum(new_id, tl.max(tl.where(keeps, ids, -1), 0))
                        seen += tl.sum(tied.to(tl.int32), 0)
                    border_order = low.to(tl.int32)
                    border_id = new_id
        key = uniform_key(tl.load(SEEDS + row), tl.load(POSITIONS + row))
        min_p = tl.load(MIN_PS + row)
        best = tl.full((), float("-inf"), tl.float64)
        best_id = tl.full((), 0x7FFFFFFF, tl.int32)
        for first in range(0, vocab, TILE):
            ids = first + offsets
            inside = ids < vocab
            x = load_scores(LOGITS, SCORES, logits_row, scores_row, adjusted, ids, inside)
            kept = inside & _above(order_of(x), ids, border_order, border_id)
            if (tl.max(x, 0) - top) / temperature > -GUMBEL_RANGE:
                value, token = best_draw(x, ids, kept, key, temperature, top, min_p)
                better = (value > best) | ((value == best) & (token < best_id))
                best = tl.where(better, value, best)
                best_id = tl.where(better, token, best_id)
        tl.store(DRAWS + row * num_parts, best)
        tl.store(IDS + (tl.num_programs(0) + row) * num_parts, best_id)
