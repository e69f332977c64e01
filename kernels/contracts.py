"""What every backend asks of a call before kernels follow its addresses: shapes, types and order in memory.

Knows specs and tensors, no layout and no device. Attribute reads alone unless a check says otherwise: a step makes
hundreds of them, and some inside the capture of a CUDA graph. Each raises ValueError with what does not fit, or
TypeError for what another backend made.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kernels.api import AttentionPlan, AttentionSpec, KVCache, KVCacheSpec, QKNorm, RaggedBatch, RopeTable
from kernels.blocks import check_planned

_Cache = TypeVar("_Cache", bound=KVCache)
_Plan = TypeVar("_Plan", bound=AttentionPlan)


class _Planned(Protocol):
    """What every backend's plan remembers: the batch, and (num_blocks, block_size) of the cache."""

    @property
    def batch(self) -> RaggedBatch: ...

    @property
    def blocks(self) -> tuple[int, int]: ...


def own_cache(cache: KVCache, kind: type[_Cache]) -> _Cache:
    if not isinstance(cache, kind):
        raise TypeError(f"the KV cache was allocated by another backend: {type(cache).__name__}")
    return cache


def own_plan(plan: AttentionPlan, kind: type[_Plan]) -> _Plan:
    if not isinstance(plan, kind):
        raise TypeError(f"the plan was made by another backend: {type(plan).__name__}")
    return plan


# A step's batch


def check_batch(batch: RaggedBatch) -> None:
    """That a batch's tensors have the shapes and the type that its sizes say."""
    num_rows = batch.num_rows
    if num_rows < 1:
        raise ValueError(f"num_rows {num_rows}: query_starts must run from 0 to num_tokens over at least one row")
    expected = {
        "query_starts": (batch.query_starts, (num_rows + 1,)),
        "context_lens": (batch.context_lens, (num_rows,)),
        "block_tables": (batch.block_tables, (num_rows, *batch.block_tables.shape[1:2])),
        "positions": (batch.positions, (batch.num_tokens,)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != tuple(shape) or len(shape) != tensor.dim():
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, must have {tuple(shape)} for {num_rows} rows")
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32, is {tensor.dtype} with strides {tensor.stride()}")


def check_ends(batch: RaggedBatch) -> None:
    """That the rows cover the step's tokens. Reads two numbers: not for tensors on a device."""
    starts = batch.query_starts
    if int(starts[0]) != 0 or int(starts[-1]) != batch.num_tokens:
        raise ValueError(f"query_starts must run from 0 to num_tokens {batch.num_tokens} over at least one row")


# Heads


def num_query_heads(qkv: Tensor, plan: _Planned, spec: KVCacheSpec) -> int:
    """Query heads in qkv, once it fits the plan, and the plan the cache."""
    num_tokens, width = qkv.shape
    num_kv_heads, head_dim = spec.num_kv_heads, spec.head_dim
    num_heads = width // head_dim - 2 * num_kv_heads
    fits = num_tokens == plan.batch.num_tokens and width % head_dim == 0
    if not fits or num_heads < 1 or num_heads % num_kv_heads or not qkv.is_contiguous():
        raise ValueError(
            f"qkv is {tuple(qkv.shape)} with strides {qkv.stride()}; contiguous rows of {plan.batch.num_tokens} tokens "
            f"were planned, of heads of {head_dim}: {num_kv_heads} of keys, as many of values, and of queries a "
            "multiple of that"
        )
    check_planned(plan.blocks, spec)
    return num_heads


def check_attention(spec: AttentionSpec, num_heads: int) -> None:
    """That a layer attends with the query heads that qkv holds, over something."""
    if num_heads != spec.num_heads:
        raise ValueError(f"qkv holds {num_heads} query heads, the layer {spec.num_heads}")
    if spec.scale <= 0 or any(limit is not None and limit <= 0 for limit in (spec.window, spec.soft_cap)):
        raise ValueError(f"scale {spec.scale}, window {spec.window} and soft_cap {spec.soft_cap} must be positive")


def check_rotation(rope: RopeTable, qk_norm: QKNorm | None, head_dim: int, num_positions: int) -> None:
    """That the tables turn heads of that size at that many positions, and that both norms are theirs, of one type."""
    cos, sin = rope.cos, rope.sin
    alike = cos.shape == sin.shape and cos.dtype == sin.dtype == torch.float32
    if not alike or len(cos) < num_positions or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(
            f"rope has {tuple(cos.shape)} cosines and {tuple(sin.shape)} sines of {cos.dtype}; the step needs "
            f"contiguous fp32 and positions up to {num_positions - 1}"
        )
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"rope turns {2 * cos.shape[1]} dimensions of a head of {head_dim}")
    if qk_norm is not None:
        check_norm(qk_norm.q_weight, head_dim)
        check_norm(qk_norm.k_weight, head_dim)
        if qk_norm.q_weight.dtype != qk_norm.k_weight.dtype:
            types = qk_norm.q_weight.dtype, qk_norm.k_weight.dtype
            raise ValueError(f"the norms of queries and keys are {types[0]} and {types[1]}, must be the same")


# Dense layers


def check_norm(weight: Tensor, width: int) -> None:
    if weight.shape != (width,) or not weight.is_contiguous():
        raise ValueError(f"a norm's weight is {tuple(weight.shape)}, must be ({width},), contiguous")


def check_residual(residual: Tensor, x: Tensor) -> None:
    if residual.shape != x.shape or not residual.is_contiguous():
        raise ValueError(f"residual is {tuple(residual.shape)}, must be x's {tuple(x.shape)}, contiguous")


# Sampling


def check_logits(logits: Tensor, vocab_size: int) -> None:
    if logits.dim() != 2 or not 0 < vocab_size <= logits.shape[1]:
        raise ValueError(f"logits is {tuple(logits.shape)}, must be [rows, at least the vocabulary's {vocab_size}]")


def check_token_ids(token_ids: Tensor, logits: Tensor) -> None:
    if token_ids.shape != logits.shape[:1]:
        raise ValueError(f"token_ids is {tuple(token_ids.shape)} for {logits.shape[0]} rows of logits")


def check_num_top(num_top: int, most: int) -> None:
    """`most` is the vocabulary's size or what a kernel can rank."""
    if not 0 <= num_top <= most:
        raise ValueError(f"num_top {num_top} must be in 0..{most}")
