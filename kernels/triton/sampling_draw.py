"""One read of the logits: for every part of a row its likeliest token, whether it is finite, and its best draw.

A second kernel makes a row's choice of its parts. Rows with top-k, top-p or min-p are drawn between the two, by
sampling_truncate.py. Parts are of one length for every batch, so no row's result depends on another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.penalties import is_adjusted
from kernels.triton.sampling_numbers import NO_ID, best_draw, load_scores, uniform_key

# The tensors of a SamplingBatch lie where they lie: their places are no reason to compile anew.
BATCH_POINTERS = [
    "TEMPERATURES",
    "TOP_KS",
    "TOP_PS",
    "MIN_PS",
    "SEEDS",
    "POSITIONS",
    "HISTORY_STARTS",
    "BIAS_STARTS",
    "FORBIDDEN_STARTS",
]


@triton.jit
def is_truncated(TOP_KS, TOP_PS, MIN_PS, row, vocab):
    """Whether top-k, top-p or min-p may leave a token out."""
    top_k = tl.load(TOP_KS + row)
    return ((top_k > 0) & (top_k < vocab)) | (tl.load(TOP_PS + row) < 1.0) | (tl.load(MIN_PS + row) > 0.0)


@triton.jit(do_not_specialize_on_alignment=BATCH_POINTERS)
def scan_parts(
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
    stride,
    vocab,
    ADJUSTS: tl.constexpr,
    PART: tl.constexpr,
):
    """A program per row and part. TOPS [B, parts] fp32 and DRAWS [B, parts] fp64 are values, IDS [3, B, parts] int32
    the likeliest token, the drawn one, and whether all logits are finite."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    place = row * tl.num_programs(1) + part
    plane = tl.num_programs(0) * tl.num_programs(1)
    ids = part * PART + tl.arange(0, PART)
    inside = ids < vocab
    logits_row = row.to(tl.int64) * stride
    raw = tl.load(LOGITS + logits_row + ids, mask=inside, other=0.0).to(tl.float32)
    finite = tl.min((tl.abs(raw) < float("inf")).to(tl.int32), 0)
    adjusted = False
    if ADJUSTS:
        adjusted = is_adjusted(HISTORY_STARTS, BIAS_STARTS, FORBIDDEN_STARTS, row)
    x = load_scores(LOGITS, SCORES, logits_row, row.to(tl.int64) * vocab, adjusted, ids, inside)
    top = tl.max(x, 0)
    top_id = tl.min(tl.where((x == top) & inside, ids, NO_ID), 0)
    best = tl.full((), float("-inf"), tl.float64)
    best_id = tl.full((), 0x7FFFFFFF, tl.int32)
    temperature = tl.load(TEMPERATURES + row)
    drawn = (temperature > 0.0) & (tl.abs(top) < float("inf"))
    if drawn & (is_truncated(TOP_KS, TOP_PS, MIN_PS, row, vocab) == 0):
        key = uniform_key(tl.load(SEEDS + row), tl.load(POSITIONS + row))
        best, best_id = best_draw(x, ids, inside, key, temperature, top, top * 0.0)
    tl.store(TOPS + place, top)
    tl.store(DRAWS + place, best)
    tl.store(IDS + place, top_id)
    tl.store(IDS + plane + place, best_id)
    tl.store(IDS + 2 * plane + place, finite)


@triton.jit(do_not_specialize_on_alignment=["TEMPERATURES"])
def choose_of_parts(TOPS, DRAWS, IDS, TEMPERATURES, TOKENS, FINITE, num_parts, PARTS: tl.constexpr):
    """A program per row: the token drawn, or the likeliest where the temperature is 0 or nothing can be drawn."""
    row = tl.program_id(0)
    plane = tl.num_programs(0) * num_parts
    parts = tl.arange(0, PARTS)
    here = parts < num_parts
    place = row * num_parts + parts
    tops = tl.load(TOPS + place, mask=here, other=float("-inf"))
    draws = tl.load(DRAWS + place, mask=here, other=float("-inf"))
    top_ids = tl.load(IDS + place, mask=here, other=NO_ID)
    drawn_ids = tl.load(IDS + plane + place, mask=here, other=NO_ID)
    finite = tl.min(tl.load(IDS + 2 * plane + place, mask=here, other=1), 0)
    top = tl.max(tops, 0)
    token = tl.min(tl.where(here & (tops == top), top_ids, NO_ID), 0)
    best = tl.max(draws, 0)
    drawn = tl.min(tl.where(here & (draws == best), drawn_ids, NO_ID), 0)
    usable = (tl.load(TEMPERATURES + row) > 0.0) & (tl.abs(top) < float("inf")) & (drawn < NO_ID)
    tl.store(TOKENS + row, tl.where(usable, drawn, token).to(tl.int64))
    tl.store(FINITE + row, finite.to(tl.int8))
