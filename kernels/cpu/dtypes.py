"""Element types as the extension numbers them (src/abi.h)."""

from __future__ import annotations

import torch

DTYPE_CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


def dtype_code(dtype: torch.dtype) -> int:
    """Raises ValueError for a type the kernels do not compute with."""
    code = DTYPE_CODES.get(dtype)
    if code is None:
        raise ValueError(f"dtype {dtype} is not one of {', '.join(map(str, DTYPE_CODES))}")
    return code
