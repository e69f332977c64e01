"""What the C++ kernels' callers must hold to: the kernels follow addresses blindly.

Attribute reads alone: a step makes hundreds of these checks. Each raises the error that names what does not fit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.api import AttentionPlan, KVCache
from kernels.blocks import check_planned
from kernels.cpu.cache import CpuCache
from kernels.cpu.dtypes import DTYPE_CODES
from kernels.cpu.plan import CpuPlan


def num_query_heads(qkv: Tensor, cache: CpuCache, plan: CpuPlan) -> int:
    """Query heads in qkv; raises ValueError for a tensor that does not fit the plan and the cache."""
    spec = cache.spec
    num_tokens, width = qkv.shape
    num_heads = width // spec.head_dim - 2 * spec.num_kv_heads
    fits = num_tokens == plan.batch.num_tokens and width % spec.head_dim == 0 and num_heads > 0
    if not fits or not qkv.is_contiguous() or qkv.dtype not in DTYPE_CODES:
        raise ValueError(
            f"qkv is {tuple(qkv.shape)} {qkv.dtype}; contiguous rows of {plan.batch.num_tokens} tokens were planned, "
            f"query heads and 2 * {spec.num_kv_heads} key and value heads of {spec.head_dim}"
        )
    check_planned(plan.blocks, spec)
    return num_heads


def check_norm_weight(weight: Tensor, head_dim: int, dtype: torch.dtype) -> None:
    if weight.shape != (head_dim,) or weight.dtype != dtype or not weight.is_contiguous():
        raise ValueError(f"a norm's weight is {tuple(weight.shape)} {weight.dtype}, must be ({head_dim},) {dtype}")


def as_cpu_cache(cache: KVCache) -> CpuCache:
    if not isinstance(cache, CpuCache):
        raise TypeError(f"the KV cache was allocated by another backend: {type(cache).__name__}")
    return cache


def as_cpu_plan(plan: AttentionPlan) -> CpuPlan:
    if not isinstance(plan, CpuPlan):
        raise TypeError(f"the plan was made by another backend: {type(plan).__name__}")
    return plan
