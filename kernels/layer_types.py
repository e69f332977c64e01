"""What the calls of a model's layers take: the paged KV cache, one step's ragged batch, how a layer attends, weights.

Part of `kernels.api`, which is where they are imported from. Knows shapes; computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

# What gates an MLP: `silu_mul` or `gelu_mul`.
GatedActivation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class KVCacheSpec:
    """Shape of a paged KV cache: `num_blocks` blocks of `block_size` token positions in each of `num_layers` layers."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    # Of an fp8 cache: what each layer's keys and values are divided by when stored and multiplied by when read, as
    # checkpoints give it. None: 1 everywhere.
    scales: tuple[tuple[float, float], ...] | None = None

    def layer_scales(self, layer: int) -> tuple[float, float]:
        """The scales of a layer's keys and values."""
        return (1.0, 1.0) if self.scales is None else self.scales[layer]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block's keys and values over all layers."""
        elements = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache."""
        return self.num_blocks * self.bytes_per_block


class KVCache(Protocol):
    """Key and value memory. The layout is the backend's own; only the backend that allocated it may look inside."""

    @property
    def spec(self) -> KVCacheSpec: ...


@dataclass(frozen=True)
class RaggedBatch:
    """The rows of one step: row r runs tokens [query_starts[r], query_starts[r + 1]) of the step's token dimension.

    A row's tokens are the last ones of its context: the first of them has position context_lens[r] - (its token count).
    Prefill chunks and decode rows differ only in their token counts. Integer tensors are int32, contiguous, and on the
    backend's device.
    """

    # [num_rows + 1]; starts at 0, ends at num_tokens, strictly ascending.
    query_starts: Tensor
    # [num_rows]; tokens of the sequence whose KV is in the cache once this step has run.
    context_lens: Tensor
    # [num_rows, max_blocks]; row r's first ceil(context_lens[r] / block_size) entries are valid.
    block_tables: Tensor
    # [num_tokens]; position of each token in its sequence.
    positions: Tensor
    num_rows: int
    num_tokens: int
    max_query_len: int
    max_context_len: int


class AttentionPlan(Protocol):
    """What a backend derives from a RaggedBatch once per step and uses in every layer."""

    @property
    def batch(self) -> RaggedBatch: ...


@dataclass(frozen=True)
class RopeTable:
    """Rotary embedding, half-split style: dimension i of the first half pairs with i of the second.

    `cos` and `sin` are fp32 [max_positions, rotary_dim / 2], any attention scaling factor already multiplied in. The
    first rotary_dim dimensions of a head are rotated, the rest pass through.
    """

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class QKNorm:
    """RMS norms over head_dim applied to each query and key head before rotation (Qwen3, Gemma 3)."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


@dataclass(frozen=True)
class AttentionSpec:
    """How one layer attends. Causal always: position p sees positions 0..p."""

    num_heads: int
    # Multiplies q·k; usually head_dim ** -0.5.
    scale: float
    # Sees only the last `window` positions, its own included. None: all.
    window: int | None = None
    # Scores become soft_cap * tanh(score / soft_cap). None: unchanged.
    soft_cap: float | None = None


class PackedLinear(Protocol):
    """A weight matrix in the backend's own layout."""

    @property
    def in_features(self) -> int: ...

    @property
    def out_features(self) -> int: ...
