"""From rows to the tensors of one step: gathers with array operations, never token by token.

Knows the row table and the kernel API's RaggedBatch; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.api import RaggedBatch
from worker_svc.rows import Int64Array, RowTable


@dataclass(frozen=True)
class StepInput:
    """One step's tokens [num_tokens] int64 and how they divide into rows."""

    token_ids: Tensor
    batch: RaggedBatch


def build_step_input(rows: RowTable, slots: Int64Array, counts: Int64Array) -> StepInput:
    """The next `counts[r]` uncomputed tokens of each row. At least one row; the rows have been checked."""
    computed = rows.num_computed_tokens[slots]
    context_lens = computed + counts
    query_starts = np.zeros(len(slots) + 1, np.int64)
    np.cumsum(counts, out=query_starts[1:])
    num_tokens = int(query_starts[-1])
    # Token t of row r is at position computed[r] + (t - query_starts[r]).
    positions = np.arange(num_tokens) + np.repeat(computed - query_starts[:-1], counts)
    token_ids = rows.token_ids[np.repeat(slots, counts), positions]
    max_context_len = int(context_lens.max())
    max_blocks = -(-max_context_len // rows.limits.block_size)
    batch = RaggedBatch(
        query_starts=torch.from_numpy(query_starts.astype(np.int32)),
        context_lens=torch.from_numpy(context_lens.astype(np.int32)),
        block_tables=torch.from_numpy(np.ascontiguousarray(rows.block_tables[slots, :max_blocks])),
        positions=torch.from_numpy(positions.astype(np.int32)),
        num_rows=len(slots),
        num_tokens=num_tokens,
        max_query_len=int(counts.max()),
        max_context_len=max_context_len,
    )
    return StepInput(torch.from_numpy(token_ids.astype(np.int64)), batch)
