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
from kernels.triton.sampling_bracket import find_bracket, is_kept, load_tile
from kernels.triton.sampling_draw import BATCH_POINTERS, is_truncated
from kernels.triton.sampling_numbers import (
    GUMBEL_RANGE,
    NO_ID,
    best_draw,
    number_of,
    order_of,
    uniform_key,
)

_COMPARED = tl.constexpr(8)
# Below every token, as order and id packed into one int64.
_NOTHING = tl.constexpr(-0x8000000000000000)


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
        ids, inside, x = load_tile(logits, scores, adjusted, first, vocab, TILE)
        order = order_of(x)
        wide = order.to(tl.int64)
        within = inside & is_kept(order, ids, border_order, border_id) & (wide >= low) & (wide < high)
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
        ids, inside, x = load_tile(logits, scores, adjusted, first, vocab, TILE)
        order = order_of(x)
        tied = inside & is_kept(order, ids, border_order, border_id) & (order == number)
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
        ids, inside, x = load_tile(logits, scores, adjusted, first, vocab, TILE)
        kept = inside & is_kept(order_of(x), ids, border_order, border_id)
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
                low, high, high_count, high_mass, wanted_mass = find_bracket(
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
