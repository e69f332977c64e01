"""Normalises, rotates and stores a step's queries, keys and values, in one launch from the qkv product's output.

Knows heads, rotary tables and slots; knows no attention. A program takes some pairs (token, head) of one kind. The two
halves that a rotation mixes are two tiles of one shape, so that every element is read and written by the same thread.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.api import QKNorm, RopeTable
from kernels.contracts import check_rotation
from kernels.triton.cache import TritonCache
from kernels.triton.launch import UNFUSED
from kernels.triton.metadata import TritonPlan

_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def _round_for_cache(x, OUT: tl.constexpr):
    """To the cache's dtype; to fp8 what is too large saturates, and what is no number stays none."""
    if tl.float8e4nv == OUT:
        x = tl.clamp(x, -_FP8_MAX, _FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    return x.to(OUT)


@triton.jit
def _store_values(source, VALUES, target, real, value_factor, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr):
    dim = tl.arange(0, PADDED_DIM)[None, :]
    here = real & (dim < HEAD_DIM)
    value = tl.load(source + dim, mask=here, other=0.0)
    if VALUES.dtype.element_ty == tl.float8e4nv:
        value = value.to(tl.float32) * value_factor
    tl.store(VALUES + target + dim, _round_for_cache(value, VALUES.dtype.element_ty), mask=here)


@triton.jit
def _normalised(
    first,
    second,
    rest,
    WEIGHT,
    half,
    tail,
    eps,
    DTYPE: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    REST: tl.constexpr,
):
    """The RMS norm of heads in their three pieces, rounded to DTYPE."""
    squares = tl.sum(tl.fma(first, first, second * second), 1)
    if REST > 0:
        squares += tl.sum(rest * rest, 1)
    root = tl.sqrt_rn(squares / HEAD_DIM + eps)[:, None]
    scale_first = tl.load(WEIGHT + half, mask=half < HALF, other=0.0).to(tl.float32)
    scale_second = tl.load(WEIGHT + HALF + half, mask=half < HALF, other=0.0).to(tl.float32)
    first = (first / root * scale_first).to(DTYPE).to(tl.float32)
    second = (second / root * scale_second).to(DTYPE).to(tl.float32)
    if REST > 0:
        scale_rest = tl.load(WEIGHT + tail, mask=tail < HEAD_DIM, other=0.0).to(tl.float32)
        rest = (rest / root * scale_rest).to(DTYPE).to(tl.float32)
    return first, second, rest


@triton.jit
def _store_head(
    target,
    first,
    second,
    rest,
    factor,
    KIND: tl.constexpr,
    half,
    in_half,
    tail,
    in_tail,
    HALF: tl.constexpr,
    REST: tl.constexpr,
):
    tl.store(target + half, _round_for_cache(first * factor, KIND), mask=in_half)
    tl.store(target + HALF + half, _round_for_cache(second * factor, KIND), mask=in_half)
    if REST > 0:
        tl.store(target + tail, _round_for_cache(rest * factor, KIND), mask=in_tail)


@triton.jit
def _pairs(num_tokens, NUM_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PAIRS: tl.constexpr):
    """Of this program: whether its heads are of queries or of values, the first of their kind in a token's row, and
    each pair's token and head of the kind."""
    query_programs = tl.cdiv(num_tokens * NUM_HEADS, PAIRS)
    kv_programs = tl.cdiv(num_tokens * KV_HEADS, PAIRS)
    program = tl.program_id(0)
    is_query = program < query_programs
    is_value = program >= query_programs + kv_programs
    first_program = tl.where(is_query, 0, tl.where(is_value, query_programs + kv_programs, query_programs))
    first_head = tl.where(is_query, 0, tl.where(is_value, NUM_HEADS + KV_HEADS, NUM_HEADS))
    heads = tl.where(is_query, NUM_HEADS, KV_HEADS)
    pair = (program - first_program) * PAIRS + tl.arange(0, PAIRS)
    return is_query, is_value, first_head, (pair // heads).to(tl.int64), pair % heads


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["SLOTS", "POSITIONS"])
def _rope_write_kv(
    QKV,
    KEYS,
    VALUES,
    SLOTS,
    POSITIONS,
    COS,
    SIN,
    Q_WEIGHT,
    K_WEIGHT,
    num_tokens,
    eps,
    key_factor,
    value_factor,
    stride_block,
    HAS_NORM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    REST: tl.constexpr,
    PADDED_REST: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Each program takes PAIRS consecutive pairs (token, head): of query heads first, then of keys, then of values."""
    WIDTH: tl.constexpr = (NUM_HEADS + 2 * KV_HEADS) * HEAD_DIM
    is_query, is_value, first_head, token, head = _pairs(num_tokens, NUM_HEADS, KV_HEADS, PAIRS)
    slot = tl.load(SLOTS + token, mask=token < num_tokens, other=-1)
    real = (slot >= 0)[:, None]
    source = QKV + (token * WIDTH + (first_head + head) * HEAD_DIM)[:, None]
    target = (slot // BLOCK_SIZE * stride_block + (head * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM)[:, None]
    if is_value:
        _store_values(source, VALUES, target, real, value_factor, HEAD_DIM, PADDED_DIM)
        return
    half = tl.arange(0, PADDED_HALF)[None, :]
    in_half = real & (half < HALF)
    first = tl.load(source + half, mask=in_half, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + half, mask=in_half, other=0.0).to(tl.float32)
    tail = 2 * HALF + tl.arange(0, PADDED_REST)[None, :]
    in_tail = real & (tail < HEAD_DIM)
    rest = tl.zeros([PAIRS, PADDED_REST], tl.float32)
    if REST > 0:
        rest = tl.load(source + tail, mask=in_tail, other=0.0).to(tl.float32)
    if HAS_NORM:
        weight = Q_WEIGHT if is_query else K_WEIGHT
        dtype: tl.constexpr = QKV.dtype.element_ty
        first, second, rest = _normalised(first, second, rest, weight, half, tail, eps, dtype, HALF, HEAD_DIM, REST)
    position = tl.load(POSITIONS + token, mask=slot >= 0, other=0).to(tl.int64)
    angle = position[:, None] * HALF + half
    cos = tl.load(COS + angle, mask=in_half, other=0.0)
    sin = tl.load(SIN + angle, mask=in_half, other=0.0)
    turned_first = tl.fma(first, cos, -(second * sin))
    turned_second = tl.fma(second, cos, first * sin)
    if is_query:
        kind: tl.constexpr = QKV.dtype.element_ty
        _store_head(source, turned_first, turned_second, rest, 1.0, kind, half, in_half, tail, in_tail, HALF, REST)
    else:
        kind_of_keys: tl.constexpr = KEYS.dtype.element_ty
        _store_head(
            KEYS + target, turned_first, turned_second, rest, key_factor, kind_of_keys, half, in_half, tail, in_tail,
            HALF, REST,
        )  # fmt: skip


def rope_write_kv(
    qkv: Tensor,
    cache: TritonCache,
    layer: int,
    plan: TritonPlan,
    rotation: tuple[RopeTable, QKNorm | None],
    num_pairs: int,
) -> None:
    """Rotates queries in place, stores keys and values; tokens without a slot are left as they are.

    `num_pairs` is how many pairs (token, head) a program takes. Raises ValueError for tables or weights that do not
    fit the step or the heads.
    """
    spec, (rope, qk_norm) = cache.spec, rotation
    num_heads = qkv.shape[1] // spec.head_dim - 2 * spec.num_kv_heads
    half = rope.cos.shape[1]
    check_rotation(rope, qk_norm, spec.head_dim, plan.batch.max_context_len)
    rest = spec.head_dim - 2 * half
    num_tokens = plan.batch.num_tokens
    programs = sum(triton.cdiv(num_tokens * n, num_pairs) for n in (num_heads, spec.num_kv_heads, spec.num_kv_heads))
    key_scale, value_scale = spec.layer_scales(layer)
    norms = (qkv, qkv) if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight)
    keys, values = cache.layers[layer]
    _rope_write_kv[(programs,)](
        qkv,
        keys,
        values,
        plan.slots,
        plan.batch.positions,
        rope.cos,
        rope.sin,
        *norms,
        num_tokens,
        0.0 if qk_norm is None else qk_norm.eps,
        1.0 / key_scale,
        1.0 / value_scale,
        keys.stride(0),
        HAS_NORM=qk_norm is not None,
        NUM_HEADS=num_heads,
        KV_HEADS=spec.num_kv_heads,
        HEAD_DIM=spec.head_dim,
        HALF=half,
        PADDED_HALF=triton.next_power_of_2(half),
        REST=rest,
        PADDED_REST=triton.next_power_of_2(max(1, rest)),
        PADDED_DIM=triton.next_power_of_2(spec.head_dim),
        BLOCK_SIZE=spec.block_size,
        PAIRS=num_pairs,
        num_warps=4,
        **UNFUSED,
    )
