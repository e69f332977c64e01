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
from kernels.triton.sampling_bracket import Border, Limit, Row, find_bracket, load_kept, odds_of
from kernels.triton.sampling_draw import BATCH_POINTERS, is_truncated
from kernels.triton.sampling_numbers import GUMBEL_RANGE, NO_ID, best_draw, number_of, uniform_key

_COMPARED = tl.constexpr(8)
# Below every token, as order and id packed into one int64.
_NOTHING = tl.constexpr(-0x8000000000000000)


@triton.jit
def _gather(row, border, bracket, gathered_at, TILE: tl.constexpr, RANKED: tl.constexpr):
    """Stores the bracket's kept tokens, order and id packed so that greater is likelier; how many they are."""
    gathered = 0
    for first in range(0, row.vocab, TILE):
        ids, _, order, kept = load_kept(row, border, first, TILE)
        wide = order.to(tl.int64)
        within = kept & (wide >= bracket.low) & (wide < bracket.high)
        if tl.max(within.to(tl.int32), 0) > 0:
            place = gathered + tl.cumsum(within.to(tl.int32), 0) - 1
            packed = (wide << 32) | (ids ^ NO_ID).to(tl.int64)
            tl.store(gathered_at + place, packed, mask=within & (place < RANKED))
            gathered += tl.sum(within.to(tl.int32), 0)
    return gathered


@triton.jit
def _border_by_rank(row, limit, bracket, gathered_at, gathered, RANKED: tl.constexpr):
    """The last kept token of those gathered. A few hundred are ranked sooner by comparing each with each than by
    sorting."""
    number = tl.arange(0, RANKED)
    packed = tl.load(gathered_at + number, mask=number < gathered, other=_NOTHING)
    rank = tl.zeros([RANKED], tl.int32)
    before = tl.zeros([RANKED], tl.float64)
    for first in range(0, gathered, _COMPARED):
        others = first + tl.arange(0, _COMPARED)
        other = tl.load(gathered_at + others, mask=others < gathered, other=_NOTHING)
        odds_of_other = odds_of(row, number_of((other >> 32).to(tl.int32))).to(tl.float64)
        precedes = other[None, :] > packed[:, None]
        rank += tl.sum(precedes.to(tl.int32), 1)
        before += tl.sum(tl.where(precedes, odds_of_other[None, :], 0.0), 1)
    fewer = rank < limit.top_k - bracket.high_count
    keeps = fewer if limit.by_count else (bracket.high_mass + before < bracket.wanted_mass)
    keeps = (keeps | (rank == 0)) & (number < gathered)
    last = tl.min(tl.where(keeps, packed, 0x7FFFFFFFFFFFFFFF), 0)
    return Border((last >> 32).to(tl.int32), (last & 0x7FFFFFFF).to(tl.int32) ^ NO_ID)


@triton.jit
def _border_among_ties(row, border, limit, bracket, TILE: tl.constexpr):
    """The last kept token of those of the bracket's one number, counted by id."""
    number = bracket.low.to(tl.int32)
    odds_each = odds_of(row, number_of(number)).to(tl.float64)
    seen = 0
    new_id = border.token
    for first in range(0, row.vocab, TILE):
        ids, _, order, kept = load_kept(row, border, first, TILE)
        tied = kept & (order == number)
        nth = seen + tl.cumsum(tied.to(tl.int32), 0)
        before = bracket.high_mass + (nth - 1).to(tl.float64) * odds_each
        keeps = (nth <= limit.top_k - bracket.high_count) if limit.by_count else (before < bracket.wanted_mass)
        keeps = (keeps | (nth == 1)) & tied
        new_id = tl.where(seen == 0, -1, new_id)
        new_id = tl.maximum(new_id, tl.max(tl.where(keeps, ids, -1), 0))
        seen += tl.sum(tied.to(tl.int32), 0)
    return Border(number, new_id)


@triton.jit
def _border(row, top_k, top_p, gathered_at, TILE: tl.constexpr, RANKED: tl.constexpr):
    """The last token that top-k keeps, and top-p of those."""
    border = Border(tl.full((), -0x80000000, tl.int32), tl.full((), 0x7FFFFFFF, tl.int32))
    for number in range(2):
        limit = Limit(number == 0, top_k, top_p)
        if tl.where(limit.by_count, (top_k > 0) & (top_k < row.vocab), top_p < 1.0):
            bracket = find_bracket(row, border, limit, TILE, RANKED)
            if bracket.high - bracket.low > 1:
                gathered = _gather(row, border, bracket, gathered_at, TILE, RANKED)
                tl.debug_barrier()
                border = _border_by_rank(row, limit, bracket, gathered_at, gathered, RANKED)
                tl.debug_barrier()
            else:
                border = _border_among_ties(row, border, limit, bracket, TILE)
    return border


@triton.jit
def _draw_above(row, border, key, min_p, TILE: tl.constexpr):
    """The best draw of the tokens up to the border: value and id."""
    best = tl.full((), float("-inf"), tl.float64)
    best_id = tl.full((), 0x7FFFFFFF, tl.int32)
    for first in range(0, row.vocab, TILE):
        ids, x, _, kept = load_kept(row, border, first, TILE)
        if (tl.max(x, 0) - row.top) / row.temperature > -GUMBEL_RANGE:
            value, token = best_draw(x, ids, kept, key, row.temperature, row.top, min_p)
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
        known = Row(logits, scores, adjusted, vocab, top, temperature, 1.4426950408889634 / temperature)
        top_k, top_p = tl.load(TOP_KS + row), tl.load(TOP_PS + row).to(tl.float64)
        border = _border(known, top_k, top_p, GATHERED + row * RANKED, TILE, RANKED)
        key = uniform_key(tl.load(SEEDS + row), tl.load(POSITIONS + row))
        best, best_id = _draw_above(known, border, key, tl.load(MIN_PS + row), TILE)
        tl.store(DRAWS + row * num_parts, best)
        tl.store(IDS + (tl.num_programs(0) + row) * num_parts, best_id)
