"""The layers of a decoder whose weights are shared by the ranks of a group; one rank holds them whole.

Column-divided layers compute outputs of their own from whole inputs: nothing passes between ranks. Row-divided layers
compute a part of every output from inputs of their own, and the parts are summed. Knows weights, the kernel API and
the group; no config and no names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.api import Backend, PackedLinear
from worker_svc.parallel.group import TPGroup


@dataclass(frozen=True)
class ColumnLinear:
    """A matrix of which this rank holds output columns: its heads, its MLP channels, its part of the vocabulary."""

    kernels: Backend
    packed: PackedLinear

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, in_features] to this rank's [num_tokens, columns]."""
        return self.kernels.linear(x, self.packed)


@dataclass(frozen=True)
class RowLinear:
    """A matrix of which this rank holds the rows that its own inputs meet. The bias is rank 0's, so added once."""

    kernels: Backend
    packed: PackedLinear
    group: TPGroup

    def __call__(self, x: Tensor) -> Tensor:
        """This rank's [num_tokens, inputs] to the whole [num_tokens, out_features]."""
        return self.group.all_reduce(self.kernels.linear(x, self.packed))


@dataclass(frozen=True)
class Embedding:
    """All rows of the embedding."""

    table: Tensor

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size] of int64 ids; a copy."""
        return self.table[token_ids]


@dataclass(frozen=True)
class DividedEmbedding:
    """Rows of the embedding from `first_id` on. Exactly one rank has a token's; the others add zeros to it."""

    table: Tensor
    first_id: int
    group: TPGroup

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size] of int64 ids below the vocabulary's end."""
        rows = token_ids - self.first_id
        is_ours = (rows >= 0) & (rows < len(self.table))
        found = self.table[torch.where(is_ours, rows, 0)]
        return self.group.all_reduce(found.masked_fill_(~is_ours.unsqueeze(1), 0))


def padded_rows(table: Tensor, num_rows: int) -> Tensor:
    """A table with rows of zeros behind its own, up to `num_rows`; itself where it has as many."""
    return torch.nn.functional.pad(table, (0, 0, 0, num_rows - len(table))) if len(table) < num_rows else table
