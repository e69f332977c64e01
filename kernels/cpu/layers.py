"""All layers of a decoder as one call of the extension, which runs the same kernels in the same order.

Knows how src/abi.h lays a layer out. What `CpuBackend` checks at each call is checked here once, when layers are fused,
and the rest once a step.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import contracts
from kernels.api import FusableLayer, GatedActivation
from kernels.blocks import check_planned
from kernels.cpu.cache import CpuCache
from kernels.cpu.dtypes import DTYPE_CODES, dtype_code
from kernels.cpu.extension import native
from kernels.cpu.plan import CpuPlan
from kernels.cpu.products import CpuLinear

# LayerWeights of src/abi.h: four matrices, six norms, the rotation and the attention.
_LAYER = struct.Struct("=" + 4 * "qqqqqq" + 6 * "qq" + "qqqq" + "ddd")


@dataclass(frozen=True)
class LayerStack:
    """Layers in the extension's terms. Holds what the addresses in `packed` point to."""

    layers: tuple[FusableLayer, ...]
    packed: bytearray
    address: int
    hidden_size: int
    # Width of what the first matrix of a layer gives: heads of queries, keys and values.
    qkv_width: int
    num_heads: int
    # Of what goes through the matrices.
    dtype: torch.dtype
    num_positions: int
    eps: float
    is_gelu: bool


def stack_layers(layers: Sequence[FusableLayer], eps: float, activation: GatedActivation) -> LayerStack | None:
    """None where a matrix is multiplied by something other than the extension.

    Raises ValueError for layers that do not fit each other.
    """
    if not layers or not all(isinstance(matrix, CpuLinear) for layer in layers for matrix in _matrices(layer)):
        return None
    first = layers[0]
    shapes = [tuple((m.in_features, m.out_features) for m in _matrices(layer)) for layer in layers]
    qkv, output, gate_up, down = shapes[0]
    dtype = first.qkv.dtype if isinstance(first.qkv, CpuLinear) else torch.float32
    fits = output[1] == gate_up[0] == down[1] == qkv[0] and gate_up[1] == 2 * down[0]
    if not fits or any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"layers are chained by their widths, all alike; the first is {shapes[0]}")
    head_dim, rest = divmod(output[0], first.attention.num_heads)
    if rest or any(layer.attention.num_heads != first.attention.num_heads for layer in layers):
        raise ValueError(f"every layer must have {first.attention.num_heads} query heads of {head_dim}")
    for layer in layers:
        _check(layer, qkv[0], head_dim, dtype)
    packed = bytearray(b"".join(_packed(layer) for layer in layers))
    address = torch.frombuffer(packed, dtype=torch.uint8).data_ptr()
    return LayerStack(
        layers=tuple(layers),
        packed=packed,
        address=address,
        hidden_size=qkv[0],
        qkv_width=qkv[1],
        num_heads=first.attention.num_heads,
        dtype=dtype,
        num_positions=min(len(layer.rope.cos) for layer in layers),
        eps=eps,
        is_gelu=activation == "gelu_tanh",
    )


def run(
    context: int, stack: LayerStack, num_layers: int, x: Tensor, residual: Tensor, plan: CpuPlan, cache: CpuCache
) -> None:
    """As `FusedLayers`. Raises ValueError for tensors that do not fit layers, plan or cache."""
    spec = cache.spec
    shape = (plan.batch.num_tokens, stack.hidden_size)
    for name, tensor in (("x", x), ("residual", residual)):
        if tensor.shape != shape or not tensor.is_contiguous() or tensor.dtype not in DTYPE_CODES:
            raise ValueError(f"{name} is {tuple(tensor.shape)} {tensor.dtype}, must be {shape}, contiguous")
    if x.dtype != stack.dtype or (stack.num_heads + 2 * spec.num_kv_heads) * spec.head_dim != stack.qkv_width:
        raise ValueError(
            f"x is {x.dtype} and the cache has {spec.num_kv_heads} heads of {spec.head_dim}; the layers take "
            f"{stack.dtype} and give {stack.qkv_width} columns for {stack.num_heads} query heads, keys and values"
        )
    check_planned(plan.blocks, spec)
    if plan.max_position >= stack.num_positions or not 0 <= num_layers <= min(len(stack.layers), len(cache.layers)):
        raise ValueError(
            f"{num_layers} layers at positions up to {plan.max_position}; there are {len(stack.layers)} layers that "
            f"turn {stack.num_positions} positions, and the cache has {len(cache.layers)}"
        )
    starts, contexts, tables, num_rows, max_blocks, num_tokens = plan.row_arguments
    native().layers(
        context,
        stack.address,
        len(stack.packed),
        num_layers,
        stack.num_heads,
        stack.is_gelu,
        stack.eps,
        num_tokens,
        stack.hidden_size,
        x.data_ptr(),
        residual.data_ptr(),
        dtype_code(x.dtype),
        dtype_code(residual.dtype),
        plan.slots_address,
        plan.positions_address,
        starts,
        contexts,
        tables,
        num_rows,
        max_blocks,
        cache.data.stride(0) * cache.data.element_size(),
        *cache.layer_arguments(0),
    )


def _matrices(layer: FusableLayer) -> tuple[CpuLinear, CpuLinear, CpuLinear, CpuLinear]:
    return layer.qkv, layer.output, layer.gate_up, layer.down  # type: ignore[return-value]


def _check(layer: FusableLayer, hidden_size: int, head_dim: int, dtype: torch.dtype) -> None:
    if any(matrix.dtype != dtype for matrix in _matrices(layer)):
        raise ValueError(f"every matrix must take {dtype}")
    for weight in (layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm, layer.next_norm):
        if weight is not None:
            contracts.check_norm(weight, hidden_size)
    contracts.check_rotation(layer.rope, layer.qk_norm, head_dim, 1)
    contracts.check_attention(layer.attention, layer.attention.num_heads)


def _packed(layer: FusableLayer) -> bytes:
    matrices = []
    for matrix in _matrices(layer):
        columns, depth, _, stored, panels, coded, bias = matrix.shape_arguments
        matrices += [columns, depth, stored, panels, coded, bias]
    qk = (None, None) if layer.qk_norm is None else (layer.qk_norm.q_weight, layer.qk_norm.k_weight)
    norms = (*qk, layer.attention_out_norm, layer.mlp_norm, layer.mlp_out_norm, layer.next_norm)
    weights = [
        number for norm in norms for number in ((0, 0) if norm is None else (norm.data_ptr(), dtype_code(norm.dtype)))
    ]
    cos, spec = layer.rope.cos, layer.attention
    return _LAYER.pack(
        *matrices,
        *weights,
        cos.data_ptr(),
        layer.rope.sin.data_ptr(),
        cos.shape[1],
        spec.window or 0,
        spec.scale,
        spec.soft_cap or 0.0,
        0.0 if layer.qk_norm is None else layer.qk_norm.eps,
    )
