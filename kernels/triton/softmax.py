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
def empty_state(M: tl.constexpr, MAIN_DIM: tl.constexpr, REST_DIM: tl.constexpr):
    """The state (acc, total, highest) of M queries that have seen nothing; acc has the tiles of a head."""
    acc = (tl.zeros([M, MAIN_DIM], tl.float32),)
    if REST_DIM > 0:
        acc += (tl.zeros([M, REST_DIM], tl.float32),)  # type: ignore[assignment]
    return acc, tl.zeros([M], tl.float32), tl.full([M], LOWEST, tl.float32)


@triton.jit
def score_tile(q, k, cap_scale):
    """Scores of a head's tiles q [M, D] and k [D, N], fp32, in units of what `scale` holds: see attend_tile.

    A cap of height c makes c tanh(y) = c - 2c / (e^2y + 1) of a score. What all scores of a query have in common
    changes no weight, so -1 / (e^2y + 1) stands for it, in units of 2c. `cap_scale` makes 2 log2(e) y of a product.
    """
    PRECISION: tl.constexpr = "tf32x3" if q[0].dtype == tl.float32 else "ieee"
    scores = tl.dot(q[0], k[0], input_precision=PRECISION)
    for i in tl.static_range(1, len(q)):
        scores = tl.dot(q[i], k[i], scores, input_precision=PRECISION)
    if cap_scale is not None:
        # e^2y overflows to a score of 0 and underflows to -1, as it should. A reciprocal is one instruction as the
        # square of this, five as a division.
        root = tl.math.rsqrt(tl.exp2(scores * cap_scale) + 1.0)
        scores = -root * root
    return scores


@triton.jit
def attend_tile(acc, total, highest, scores, v, scale):
    """The state after a tile of positions more: scores [M, N] (unscaled, hidden ones -inf), a head's values [N, D]."""
    PRECISION: tl.constexpr = "tf32x3" if v[0].dtype == tl.float32 else "ieee"
    new_highest = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(tl.fma(scores, scale, -new_highest[:, None]))
    decay = tl.exp2(highest - new_highest)
    total = tl.fma(total, decay, tl.sum(weights, 1))
    weights = weights.to(v[0].dtype)
    sums = ()
    for i in tl.static_range(len(v)):
        product = tl.dot(weights, v[i], acc[i] * decay[:, None], input_precision=PRECISION)
        sums += (product,)  # type: ignore[assignment]
    return sums, total, new_highest


@triton.jit
def fold(state, part):
    """The state over what `state` has seen and the partition that follows it."""
    acc, total, highest = state
    part_acc, part_total, part_highest = part
    new_highest = tl.maximum(highest, part_highest)
    keep = tl.exp2(highest - new_highest)
    add = tl.exp2(part_highest - new_highest)
    total = tl.fma(part_total, add, total * keep)
    sums = ()
    for i in tl.static_range(len(acc)):
        sums += (tl.fma(part_acc[i], add[:, None], acc[i] * keep[:, None]),)  # type: ignore[assignment]
    return sums, total, new_highest
