"""The one arithmetic of attention, which decode and prefill share: scores, the running softmax, folding partitions.

Knows tiles of numbers; knows no pages, rows or heads. Every multiplication followed by an addition is an explicit
fma: what the compiler may contract it might contract in one kernel and not in another, and then a position would
weigh differently in a masked tile than in a full one. Exponentials are to base 2: `scale` holds log2(e).

A state (acc, total, highest) stands for sum(2^s v), sum(2^s) and max(s), the first two divided by 2^highest. It
starts as (0, 0, LOWEST); hidden scores are -inf, so a tile that a row sees nothing of leaves its state bit for bit
as it was.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Finite, so that LOWEST - LOWEST is 0, and below every score of finite inputs.
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def score_tile(q, k, cap_scale, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """q [M, D] times k [D, N], fp32; through tanh(score * cap_scale) with a cap, whose height `scale` then holds."""
    scores = tl.dot(q, k, input_precision=PRECISION)
    if HAS_CAP:
        # tanh(y) = 1 - 2 / (e^2y + 1); e^2y = 2^(2 log2(e) y), which overflows to 1 and underflows to -1 as it should.
        # A reciprocal is one instruction as the square of this, five as a division.
        root = tl.math.rsqrt(tl.exp2(scores * cap_scale) + 1.0)
        scores = tl.fma(-2.0 * root, root, 1.0)
    return scores


@triton.jit
def attend_tile(acc, total, highest, scores, v, scale, PRECISION: tl.constexpr):
    """The state after one more tile of scores [M, N] (unscaled, hidden ones -inf) and values [N, D]."""
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -new_highest[:, None]))
    decay = tl.exp2(highest - new_highest)
    total = tl.fma(total, decay, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, total, new_highest


@triton.jit
def fold_weights(highest, part_highest):
    """The new maximum, and the factors of what is folded so far and of the partition that follows it."""
    new_highest = tl.maximum(highest, part_highest)
    return new_highest, tl.exp2(highest - new_highest), tl.exp2(part_highest - new_highest)
