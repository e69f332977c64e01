"""The numbers that a choice rests on, inside kernels: the reference's exp, log and uniform numbers, and Gumbel-max.

Knows logits and keys of one row; knows no batch and no memory. fp64 functions take the steps of
kernels/reference/elementary.py, each rounded once and none contracted, so they give its bits; they are for single
tokens. Whole tiles are compared with fp32 numbers first, and only what lies within their error of the best is computed
again in fp64: nearly always one token.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Above every id.
NO_ID = tl.constexpr(0x7FFFFFFF)
# A token this far below the likeliest, in units of the temperature, cannot win: Gumbel numbers lie in -2.82 .. 16.64.
GUMBEL_RANGE = tl.constexpr(20.0)
# More than the fp32 numbers of a tile may be off, where they can still win.
_MARGIN = tl.constexpr(1e-3)
# Added and taken away again, it rounds fp64 numbers to integers, ties to even.
_ROUNDING = tl.constexpr(6755399441055744.0)


@triton.jit
def exp64(x):
    """e ** x in fp64, for x at most 709: 0 below -708."""
    clamped = tl.maximum(x, -708.0)
    exponent = (clamped * LOG2_E + _ROUNDING) - _ROUNDING
    rest = (clamped - exponent * 6.93147180369123816490e-01) - exponent * 1.90821492927058770002e-10
    result = rest * 1.6059043836821613e-10 + 2.08767569878681e-09
    result = result * rest + 2.505210838544172e-08
    result = result * rest + 2.755731922398589e-07
    result = result * rest + 2.7557319223985893e-06
    result = result * rest + 2.48015873015873e-05
    result = result * rest + 0.0001984126984126984
    result = result * rest + 0.001388888888888889
    result = result * rest + 0.008333333333333333
    result = result * rest + 0.041666666666666664
    result = result * rest + 0.16666666666666666
    result = result * rest + 0.5
    result = result * rest + 1.0
    result = result * rest + 1.0
    scale = ((exponent.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)
    return tl.where(x < -708.0, 0.0, result * scale)


@triton.jit
def log64(x):
    """Natural logarithm of positive, normal fp64 numbers."""
    bits = x.to(tl.int64, bitcast=True)
    exponent = (bits >> 52) - 1023
    mantissa = ((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000).to(tl.float64, bitcast=True)
    high = mantissa > 1.4142135623730951
    mantissa = tl.where(high, mantissa * 0.5, mantissa)
    power = (exponent + high.to(tl.int64)).to(tl.float64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = square * 0.04 + 0.043478260869565216
    series = series * square + 0.047619047619047616
    series = series * square + 0.05263157894736842
    series = series * square + 0.058823529411764705
    series = series * square + 0.06666666666666667
    series = series * square + 0.07692307692307693
    series = series * square + 0.09090909090909091
    series = series * square + 0.1111111111111111
    series = series * square + 0.14285714285714285
    series = series * square + 0.2
    series = series * square + 0.3333333333333333
    series = series * square + 1.0
    return power * 6.93147180369123816490e-01 + (power * 1.90821492927058770002e-10 + 2.0 * ratio * series)


@triton.jit
def gumbel64(uniform):
    """The reference's Gumbel number of an fp32 uniform number."""
    return 0.0 - log64(0.0 - log64(uniform.to(tl.float64)))


@triton.jit
def gumbel32(uniform):
    """The same within 2e-5. Close to 1 the logarithm is a series: the hardware's has too few digits there."""
    rest = 1.0 - uniform
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * (0.25 + rest * 0.2))))
    return 0.0 - tl.log(tl.where(rest < 0.0625, series, 0.0 - tl.log(uniform)))


@triton.jit
def uniform_key(seed, position):
    """The splitmix64 of a row's int64 seed and position: see kernels.api.uniforms."""
    x = seed.to(tl.uint64) + (position.to(tl.uint64) + 1) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _lowbias32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniforms(key, ids):
    """kernels.api.uniforms of int32 ids, fp32: (2 n + 1) / 2^24 is exact."""
    x = _lowbias32(ids.to(tl.uint32) ^ key.to(tl.uint32))
    x = _lowbias32(x ^ (key >> 32).to(tl.uint32))
    return ((x >> 9).to(tl.int32) * 2 + 1).to(tl.float32) * 5.960464477539063e-08


@triton.jit
def order_of(x):
    """int32 that ascend as fp32 numbers do; x is no NaN and no negative zero. Its own inverse on bits."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def number_of(order):
    """The fp32 number that order_of took."""
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def load_scores(LOGITS, SCORES, logits_row, scores_row, adjusted, ids, inside):
    """A tile of a row's fp32 scores: the adjusted ones, where it has any, else its logits.

    -inf outside the row; what is not finite in the logits is 0 (such a row's choice is meaningless, but chosen); no
    negative zeros, so that equal means tied.
    """
    if adjusted:
        x = tl.load(SCORES + scores_row + ids, mask=inside, other=float("-inf"))
    else:
        x = tl.load(LOGITS + logits_row + ids, mask=inside, other=0.0).to(tl.float32)
        x = tl.where(tl.abs(x) < float("inf"), x, 0.0)
        x = tl.where(inside, x, float("-inf"))
    return tl.where(x == 0.0, 0.0, x)


@triton.jit
def best_draw(x, ids, kept, key, temperature, highest, min_p):
    """The kept token of a tile with the highest logit / T + Gumbel, exact in fp64: (value, id); ties to the lowest id.

    `highest` is the likeliest score of the row; a token whose probability is below `min_p` of its does not take part.
    (-inf, NO_ID) when none does.
    """
    kept = kept & (x > float("-inf"))
    distance = tl.where(kept, (x - highest) / temperature, float("-inf"))
    kept = kept & (distance > -GUMBEL_RANGE) & (tl.exp2(distance * LOG2_E) >= min_p * 0.999)
    best = tl.full((), float("-inf"), tl.float64)
    best_id = tl.full((), 0x7FFFFFFF, tl.int32)
    if tl.max(kept.to(tl.int32), 0) > 0:
        value32 = tl.where(kept, distance + gumbel32(uniforms(key, ids)), float("-inf"))
        divisor = temperature.to(tl.float64)
        highest64 = highest.to(tl.float64) / divisor
        ahead = tl.max(value32, 0)
        floor = ahead - _MARGIN
        found = 0
        while (ahead > float("-inf")) & ((ahead >= floor) | (found == 0)):
            leader = tl.min(tl.where(value32 == ahead, ids, NO_ID), 0)
            score = tl.sum(tl.where(ids == leader, x, 0.0), 0).to(tl.float64) / divisor
            value = score + gumbel64(uniforms(key, leader))
            takes_part = exp64(score - highest64) >= min_p.to(tl.float64)
            better = takes_part & ((value > best) | ((value == best) & (leader < best_id)))
            best = tl.where(better, value, best)
            best_id = tl.where(better, leader, best_id)
            floor = tl.where(takes_part & (found == 0), ahead - _MARGIN, floor)
            found = tl.where(takes_part, 1, found)
            value32 = tl.where(ids == leader, float("-inf"), value32)
            ahead = tl.max(value32, 0)
    return best, best_id
