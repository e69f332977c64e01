"""What a checkpoint is to the model: named tensors with shapes, loaded one at a time.

Names are Hugging Face's whatever the file format. It knows no file format and no model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from kernels.quantized import QuantizedWeight, columns_of, rows_of


class WeightsError(Exception):
    """Weights that do not fit the model or cannot be read; the message names tensors and files."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a checkpoint holds: `dtype` as stored, `file` where it lies."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path


@dataclass(frozen=True)
class Part:
    """Ranges of one dimension of a tensor, one behind the other: what one rank takes of it."""

    dim: int
    ranges: tuple[range, ...]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part; a view, which reads nothing else of a mapped file, where it is one range."""
        pieces = [tensor.narrow(self.dim, cut.start, len(cut)) for cut in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)

    def of_quantized(self, weight: QuantizedWeight) -> QuantizedWeight:
        """The part: what it stands for is bitwise the part of the matrix."""
        if self.dim == 0:
            return rows_of(weight, self.ranges)
        (columns,) = self.ranges
        return columns_of(weight, columns)


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a model needs: its shape in the checkpoint, and which part is taken (None: all of it)."""

    shape: tuple[int, ...]
    part: Part | None = None


class Checkpoint(Protocol):
    """An open checkpoint. Tensors loaded from it stay valid after `close`."""

    @property
    def quantization(self) -> str | None:
        """The method by which matrices are quantized, such as "awq"; None where they are floats."""
        ...

    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor it holds, without reading any."""
        ...

    def load(self, name: str) -> torch.Tensor:
        """One tensor, as stored. Raises `WeightsError` for a name it does not hold."""
        ...

    def close(self) -> None:
        """Let go of the files."""
        ...
