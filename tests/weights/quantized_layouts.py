"""Quantized matrices as the tools of each layout write them, beside what they stand for, element by element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernels.quantized import GroupedWeight
from kernels.reference.quantized import quantize_grouped, quantize_scaled

GROUP = 16
# The tensors of one module, by the last part of their names, and the matrix they stand for.
Written = tuple[dict[str, Tensor], Tensor]


def packed(numbers: Tensor, bits: int, along: int) -> Tensor:
    """Numbers in int32 words, the first in the lowest bits, word by word."""
    numbers = numbers.movedim(along, -1)
    words = torch.zeros(*numbers.shape[:-1], -(-numbers.shape[-1] * bits // 32), dtype=torch.int64)
    for place in range(numbers.shape[-1]):
        words[..., place * bits // 32] |= numbers[..., place].long() << (place * bits % 32)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).movedim(-1, along).contiguous()


def expected_matrix(weight: GroupedWeight) -> Tensor:
    """One element after the other."""
    codes, zeros, scales = weight.codes.tolist(), weight.zeros.tolist(), weight.scales.tolist()
    groups = weight.groups.tolist()
    return torch.tensor(
        [
            [(code - zeros[n][groups[k]]) * scales[n][groups[k]] for k, code in enumerate(row)]
            for n, row in enumerate(codes)
        ]
    )


def awq(weight: Tensor, group_size: int = GROUP) -> Written:
    quantized = quantize_grouped(weight, group_size)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def interleaved(numbers: Tensor) -> Tensor:
        return packed(numbers.reshape(len(numbers), -1, 8)[..., order].flatten(1), 4, 1)

    tensors = {
        "qweight": interleaved(quantized.codes.t()),
        "qzeros": interleaved(quantized.zeros.t()),
        "scales": quantized.scales.t().half().contiguous(),
    }
    return tensors, expected_matrix(quantized)


def gptq(weight: Tensor, bits: int = 4, shuffled: bool = False, offset: int = 1, group_size: int = GROUP) -> Written:
    quantized = quantize_grouped(weight, group_size, bits)
    zeros = quantized.zeros.clamp(min=1)
    groups = quantized.groups.flip(0) if shuffled else quantized.groups
    quantized = GroupedWeight(quantized.codes, quantized.scales, zeros, groups, bits)
    tensors = {
        "qweight": packed(quantized.codes.t(), bits, 0),
        "qzeros": packed(zeros.t() - offset, bits, 1),
        "scales": quantized.scales.t().half().contiguous(),
        "g_idx": groups.int(),
    }
    return tensors, expected_matrix(quantized)


def fp8(weight: Tensor, block: tuple[int, int], name: str, flat: bool = False) -> Written:
    quantized = quantize_scaled(weight, block)
    scales = quantized.scales.flatten()[0] if flat else quantized.scales
    tensors = {"weight": quantized.values, name: scales.clone(), "input_scale": torch.ones(1)}
    height, width = quantized.block
    values = quantized.values.float().tolist()
    matrix = [
        [value * quantized.scales[n // height, k // width].item() for k, value in enumerate(row)]
        for n, row in enumerate(values)
    ]
    return tensors, torch.tensor(matrix)


def packed_4_bits(weight: Tensor, symmetric: bool) -> Written:
    quantized = quantize_grouped(weight, GROUP)
    zeros = torch.full_like(quantized.zeros, 8) if symmetric else quantized.zeros
    quantized = GroupedWeight(quantized.codes, quantized.scales, zeros, quantized.groups, 4)
    tensors = {
        "weight_packed": packed(quantized.codes, 4, 1),
        "weight_scale": quantized.scales.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = packed(zeros, 4, 0)
    scales = quantized.scales.bfloat16().float()
    return tensors, expected_matrix(GroupedWeight(quantized.codes, scales, zeros, quantized.groups, 4))


def int8(weight: Tensor) -> Written:
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scales).round().to(torch.int8)
    return {"weight": values, "weight_scale": scales}, torch.tensor(values.tolist()) * scales


def compressed(layout: str, bits: int, **weights: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, **weights}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


BLOCK = (32, 48)
LAYOUTS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4}),
    "gptq 8 bits": (lambda w: gptq(w, bits=8), {"quant_method": "gptq", "bits": 8}),
    "gptq desc_act": (lambda w: gptq(w, shuffled=True), {"quant_method": "gptq", "bits": 4, "desc_act": True}),
    "gptq_v2": (
        lambda w: gptq(w, offset=0),
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    ),
    "fp8 blocks": (lambda w: fp8(w, BLOCK, "weight_scale_inv"), {"quant_method": "fp8", "weight_block_size": BLOCK}),
    "fp8 tensor": (lambda w: fp8(w, (999, 999), "weight_scale", flat=True), {"quant_method": "fp8"}),
    "fp8 channels": (lambda w: fp8(w, (1, 999), "weight_scale"), compressed("float-quantized", 8)),
    "fp8 block_structure": (
        lambda w: fp8(w, BLOCK, "weight_scale"),
        compressed("float-quantized", 8, block_structure="32x48"),
    ),
    "packed": (lambda w: packed_4_bits(w, symmetric=True), compressed("pack-quantized", 4)),
    "packed with zero points": (lambda w: packed_4_bits(w, symmetric=False), compressed("pack-quantized", 4)),
    "int8": (int8, compressed("int-quantized", 8)),
}


def quantized(tensors: dict[str, Tensor], layout: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A model's tensors with its projections in a layout, and what each stands for by its plain name."""
    writer, _ = LAYOUTS[layout]
    written: dict[str, Tensor] = {}
    matrices: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            written[name] = matrices[name] = tensor
            continue
        parts, matrices[name] = writer(tensor)
        written |= {f"{name.removesuffix('.weight')}.{kind}": part for kind, part in parts.items()}
    return written, matrices
