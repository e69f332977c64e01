"""The precisions that models are computed and cached in: their bytes, and which is taken where none is asked for."""

from __future__ import annotations

from collections.abc import Mapping

DTYPE_BYTES: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}

KV_DTYPE_BYTES: Mapping[str, int] = {**DTYPE_BYTES, "fp8_e4m3": 1}
"""Bytes of a cached number; a KV cache may be narrower than what is computed."""

BF16_INSTRUCTIONS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU flags (x86, x86, ARM) of which any one means that bf16 products run in hardware."""


def resolve_dtype(requested: str, checkpoint_dtype: str | None, cpu_flags: frozenset[str] | None) -> str:
    """The precision to compute in: what was asked, else the checkpoint's.

    A quantized checkpoint has none (None): then bfloat16 on a GPU, for which `cpu_flags` is None, and where the CPU
    has instructions for it; else float32.
    """
    return _choose_dtype(requested, checkpoint_dtype, cpu_flags)[0]


def dtype_reason(requested: str, checkpoint_dtype: str | None, cpu_flags: frozenset[str] | None) -> str:
    """Why `resolve_dtype` chose what it chose."""
    return _choose_dtype(requested, checkpoint_dtype, cpu_flags)[1]


def _choose_dtype(requested: str, checkpoint_dtype: str | None, cpu_flags: frozenset[str] | None) -> tuple[str, str]:
    if requested != "auto":
        return requested, "as given"
    if checkpoint_dtype is not None:
        return checkpoint_dtype, "the checkpoint's"
    if cpu_flags is None:
        return "bfloat16", "the checkpoint is quantized, and this is a GPU"
    if cpu_flags & BF16_INSTRUCTIONS:
        return "bfloat16", "the checkpoint is quantized, and this CPU has bf16 instructions"
    return "float32", "the checkpoint is quantized, and this CPU has no bf16 instructions"
