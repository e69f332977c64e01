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
def empty_state(M: tl.constexpr, D: tl.constexpr):
    """The state (acc, total, highest) of M queries that have seen nothing."""
    return tl.zeros([M, D], tl.float32), tl.zeros([M], tl.float32), tl.full([M], LOWEST, tl.float32)


@triton.jit
def score_tile(q, k, cap_scale):
    """Scores of q [M, D] and k [D, N], fp32, in units of what `scale` holds: see attend_tile.

    A cap of height c makes c tanh(y) = c - 2c / (e^2y + 1) of a score. What all scores of a query have in common
    changes no weight, so -1 / (e^2y + 1) stands for it, in units of 2c. `cap_scale` makes 2 log2(e) y of a product.
    """
    PRECISION: tl.constexpr = "tf32x3" if q.dtype == tl.float32 else "ieee"
    scores = tl.dot(q, k, input_precision=PRECISION)
    if cap_scale is not None:
        # e^2y overflows to a score of 0 and underflows to -1, as it should. A reciprocal is one instruction as the
        # square of this, five as a division.
        root = tl.math.rsqrt(tl.exp2(scores * cap_scale) + 1.0)
        scores = -root * root
    return scores


@triton.jit
def attend_tile(acc, total, highest, scores, v, scale):
    """The state after one more tile of scores [M, N] (unscaled, hidden ones -inf) and values [N, D]."""
    PRECISION: tl.constexpr = "tf32x3" if v.dtype == tl.float32 else "ieee"
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -new_highest[:, None]))
    decay = tl.exp2(highest - new_highest)
    total = tl.fma(total, decay, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return acc, total, new_highest


@triton.jit
def fold(state, part):
    """The state over what `state` has seen and the partition that follows it."""
    acc, total, highest = state
    part_acc, part_total, part_highest = part
    new_highest = tl.maximum(highest, part_highest)
    keep = tl.exp2(highest - new_highest)
    add = tl.exp2(part_highest - new_highest)
    total = tl.fma(part_total, add, total * keep)
    acc = tl.fma(part_acc, add[:, None], acc * keep[:, None])
    return acc, total, new_highest
