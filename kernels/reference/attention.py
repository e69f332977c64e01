"""Rotary embedding, cache writes and attention in plain torch.

Knows heads, the cache's tensor and a plan. Every matrix product has one fixed shape, [group, head_dim] x
[head_dim, KV_PARTITION] for one token, KV head and partition, batched over as many of them as the step has: what a
token gets cannot depend on what it runs with. `group_products_agree` proves that of the library at hand.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.api import KV_PARTITION, AttentionSpec, QKNorm, RopeTable
from kernels.contracts import check_attention, check_rotation, num_query_heads
from kernels.reference.cache import ReferenceCache, bits
from kernels.reference.elementary import exp, tanh
from kernels.reference.norms import rms_normalise
from kernels.reference.plan import PartitionWork, ReferencePlan

_PROBE_BATCHES = (1, 2, 3, 17, 64)
_PROBE_DISTINCT = 5


def rope_write_kv(
    qkv: Tensor, cache: ReferenceCache, layer: int, plan: ReferencePlan, rope: RopeTable, qk_norm: QKNorm | None
) -> None:
    """Normalises and rotates queries in place; stores normalised, rotated keys and plain values."""
    spec = cache.spec
    heads = _split_heads(qkv, cache, plan)
    check_rotation(rope, qk_norm, spec.head_dim, plan.batch.max_context_len)
    num_kv_heads = spec.num_kv_heads
    query, key, value = (
        heads[:, : -2 * num_kv_heads],
        heads[:, -2 * num_kv_heads : -num_kv_heads],
        heads[:, -num_kv_heads:],
    )
    rotated_query, rotated_key = query.float(), key.float()
    if qk_norm is not None:
        rotated_query = rms_normalise(rotated_query, qk_norm.q_weight, qk_norm.eps).to(qkv.dtype).float()
        rotated_key = rms_normalise(rotated_key, qk_norm.k_weight, qk_norm.eps).to(qkv.dtype).float()
    cos, sin = rope.cos[plan.positions][:, None], rope.sin[plan.positions][:, None]
    query.copy_(_rotate(rotated_query, cos, sin))
    slots = cache.data[layer].view(2, num_kv_heads, -1, spec.head_dim)
    for store, x, scale in zip(slots, (_rotate(rotated_key, cos, sin), value), spec.layer_scales(layer), strict=True):
        bits(store).index_copy_(1, plan.slots, bits(_rounded(x, spec.dtype, scale).transpose(0, 1)))


def _rounded(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """What a cache of `dtype` holds of x: in fp8 x over its scale, too large numbers saturated."""
    if dtype.itemsize > 1:
        return x.to(dtype)
    largest = torch.finfo(dtype).max
    return x.float().mul(1.0 / scale).clamp_(-largest, largest).to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _split_heads(qkv: Tensor, cache: ReferenceCache, plan: ReferencePlan) -> Tensor:
    """[num_tokens, heads, head_dim] as a view, once it fits cache and plan."""
    num_query_heads(qkv, plan, cache.spec)
    return qkv.view(qkv.shape[0], -1, cache.spec.head_dim)


@dataclass(frozen=True)
class _Partial:
    """Attention over some partitions: normalised `output` [kv_head, token, group, dim], and the softmax's maximum and
    sum of exponentials [kv_head, token, group]."""

    output: Tensor
    maximum: Tensor
    weight: Tensor


def attention(qkv: Tensor, cache: ReferenceCache, layer: int, plan: ReferencePlan, spec: AttentionSpec) -> Tensor:
    """Softmax attention of each query over its row's cached positions, [num_tokens, num_heads * head_dim]."""
    heads = _split_heads(qkv, cache, plan)
    num_tokens, num_kv_heads, head_dim = qkv.shape[0], cache.spec.num_kv_heads, cache.spec.head_dim
    check_attention(spec, heads.shape[1] - 2 * num_kv_heads)
    query = heads[:, : spec.num_heads].view(num_tokens, num_kv_heads, -1, head_dim)
    # Scales of an fp8 cache are undone where they cost least: on queries and on the result.
    key_scale, value_scale = cache.spec.layer_scales(layer)
    query = query.permute(1, 0, 2, 3).float().mul(spec.scale * key_scale).contiguous()
    group = query.shape[2]
    query = F.pad(query, (0, 0, 0, group_rows(group) - group))
    total = torch.zeros_like(query)
    maximum = torch.full(query.shape[:3], -torch.inf)
    weight = torch.zeros(query.shape[:3])
    for work in plan.works(spec.window):
        tokens = slice(None) if work.tokens is None else work.tokens
        part = _attend(query[:, tokens], cache.data[layer], work, spec)
        keep, add = part.weight.new_zeros(()), part.weight
        highest = part.maximum
        if not work.is_first:
            highest = torch.maximum(maximum[:, tokens], part.maximum)
            keep = exp(maximum[:, tokens] - highest)
            add = exp(part.maximum - highest) * part.weight
        maximum[:, tokens] = highest
        weight[:, tokens] = weight[:, tokens] * keep + add
        total[:, tokens] = total[:, tokens] * keep[..., None] + part.output * add[..., None]
    result = (total / weight[..., None])[:, :, :group]
    if value_scale != 1.0:
        result.mul_(value_scale)
    return result.permute(1, 0, 2, 3).reshape(num_tokens, -1).to(qkv.dtype)


def _attend(query: Tensor, layer_data: Tensor, work: PartitionWork, spec: AttentionSpec) -> _Partial:
    """Attention of a partition's tokens, query [kv_head, token, group, dim], over its positions alone."""
    num_kv_heads, head_dim = query.shape[0], query.shape[-1]
    shape = (num_kv_heads, -1, KV_PARTITION, head_dim)
    keys = layer_data[0].index_select(1, work.block_ids).view(shape).float()
    values = layer_data[1].index_select(1, work.block_ids).view(shape).float()
    if work.stale is not None:
        # A probability of zero does not silence an infinity or NaN left in a reused block.
        values.view(num_kv_heads, -1, head_dim).index_fill_(1, work.stale, 0.0)
    scores = _products(query, keys.transpose(2, 3), work)
    if spec.soft_cap is not None:
        scores = tanh(scores.mul_(1.0 / spec.soft_cap)).mul_(spec.soft_cap)
    if work.hidden is not None:
        scores.masked_fill_(work.hidden[:, None], -torch.inf)
    maximum = scores.amax(-1)
    # Rows of 256 are whole vectors, and torch's softmax treats each row by itself. Its largest probability is
    # exp(0) / sum, which gives the sum back.
    probabilities = torch.softmax(scores, -1)
    weight = 1.0 / probabilities.amax(-1)
    return _Partial(_products(probabilities, values, work), maximum, weight)


def _products(left: Tensor, right: Tensor, work: PartitionWork) -> Tensor:
    """left [kv_head, token, group, n] times the matrix [n, m] of each token's row in right [kv_head, row, n, m]."""
    num_kv_heads, num_tokens, group, _ = left.shape
    result = torch.empty(num_kv_heads, num_tokens, group, right.shape[-1])
    singles = work.num_singles
    for head in range(num_kv_heads):
        # Views, never copies: a copy lays transposed keys out anew, and another layout is another kernel.
        if singles:
            torch.bmm(left[head, :singles], right[head, :singles], out=result[head, :singles])
        for chunk in work.chunks:
            matrix = right[head, chunk.row].expand(chunk.end - chunk.begin, -1, -1)
            tokens = slice(chunk.begin, chunk.end)
            torch.bmm(left[head, tokens], matrix, out=result[head, tokens])
    return result


def group_rows(group: int) -> int:
    """Rows that the products of a group of query heads are computed with.

    Two threads give five to seven rows other bits by their place in the batch (AVX2, torch 2.13), and eight the same.
    """
    return 8 if 4 < group < 8 else group


def group_products_agree(group: int, head_dim: int) -> bool:
    """Whether the two products of attention give equal inputs equal bits at every place of batches of several sizes,
    with as many threads as torch has now."""
    return _products_agree(group_rows(group), head_dim, torch.get_num_threads())


@functools.cache
def _products_agree(group: int, head_dim: int, num_threads: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    for depth, width in ((head_dim, KV_PARTITION), (KV_PARTITION, head_dim)):
        left = torch.randn(_PROBE_DISTINCT, group, depth, generator=generator)
        right = torch.randn(_PROBE_DISTINCT, width, depth, generator=generator).transpose(1, 2)
        if depth == KV_PARTITION:
            right = right.contiguous()
        alone = torch.cat([torch.bmm(left[i : i + 1], right[i : i + 1]) for i in range(_PROBE_DISTINCT)])
        for size in _PROBE_BATCHES:
            which = torch.arange(size) % _PROBE_DISTINCT
            # `right` repeated as separate matrices, then one matrix shared: the two forms of `_products`.
            rows = right.transpose(1, 2)[which].transpose(1, 2) if depth == head_dim else right[which]
            shared = torch.bmm(left[:1].expand(size, -1, -1).contiguous(), right[0].expand(size, -1, -1))
            if not torch.equal(torch.bmm(left[which], rows), alone[which]):
                return False
            if not torch.equal(shared, alone[:1].expand(size, -1, -1)):
                return False
    return True
