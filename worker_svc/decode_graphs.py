"""The decode step as CUDA graphs: one for each of a few numbers of rows, a batch padded to the next of them.

A graph holds everything from the ids of the rows' last tokens to their hidden states: where the tokens are, which
blocks they see and how much work that is, all is read on the device, from buffers that each step fills anew. A padding
row has context length 0, which the kernels skip. Knows the decoder and the kernel API; samples nothing.
"""

from __future__ import annotations

import bisect
import logging
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.api import Backend, KVCache, RaggedBatch
from worker_svc.device.api import Device, Graph
from worker_svc.model.decoder import Decoder
from worker_svc.rows import Int64Array, RowTable
from worker_svc.step_inputs import DeviceInputs, token_arrays

_LOG = logging.getLogger(__name__)

LARGEST_GRAPH_ROWS = 512


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Rows of the graphs, ascending: 1, 2, 4, every 8 to 128, every 16 to 256, every 32 to 512, and as many as may run.

    36 at most. From 64 rows on a batch is padded by an eighth at most.
    """
    largest = min(max_num_seqs, LARGEST_GRAPH_ROWS)
    steps = (1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, LARGEST_GRAPH_ROWS + 1, 32))
    return (*(size for size in steps if size < largest), largest)


@dataclass(frozen=True)
class DecodedRows:
    """The hidden states [rows, hidden_size] and, where the kernels report them, what is wrong with the rows [rows]."""

    hidden: Tensor
    faults: Tensor | None


@dataclass(frozen=True)
class GraphModel:
    """What the graphs compute with."""

    decoder: Decoder
    backend: Backend
    cache: KVCache


class DecodeGraphs:
    """Graphs of steps in which every row has one token. Used by the step thread."""

    def __init__(
        self, device: Device, rows: RowTable, inputs: DeviceInputs, model: GraphModel, sizes: tuple[int, ...]
    ) -> None:
        self.sizes = sizes
        self._device, self._rows, self._inputs, self._model = device, rows, inputs, model
        self._graphs: dict[int, Graph] = {}
        largest, place = sizes[-1], device.torch_device
        self._buffer = torch.zeros(5 * (4 * largest + 16), dtype=torch.uint8, device=place)
        self._context_lens, self._positions, self._slots, self._ids, self._is_ahead = self._fill(np.zeros(0, np.int64))
        self._query_starts = torch.arange(largest + 1, dtype=torch.int32, device=place)
        self._faults = torch.zeros(largest, dtype=torch.int32, device=place)
        self._has_faults = False
        # Made by the first, which is the largest.
        self._hidden: Tensor | None = None

    @torch.inference_mode()
    def capture(self) -> None:
        """All of them, the largest first: the others then fit into its memory."""
        begun_s = time.perf_counter()
        for size in reversed(self.sizes):
            self._graphs[size] = self._device.capture(lambda size=size: self._launch(size))  # type: ignore[misc]
        _LOG.info(
            "%d graphs of decode steps, up to %d rows, in %.1f s",
            len(self.sizes),
            self.sizes[-1],
            time.perf_counter() - begun_s,
        )

    def takes(self, counts: Int64Array) -> bool:
        """Whether there is a graph for a step of such rows."""
        return bool(self._graphs) and len(counts) <= self.sizes[-1] and bool((counts == 1).all())

    def run(self, slots: Int64Array) -> DecodedRows:
        """One token of each row. What it returns is overwritten by the next step's launch."""
        self._inputs.device_rows.update(slots)
        self._fill(slots)
        size = self.sizes[bisect.bisect_left(self.sizes, len(slots))]
        self._graphs[size].replay()
        assert self._hidden is not None
        return DecodedRows(self._hidden[: len(slots)], self._faults[: len(slots)] if self._has_faults else None)

    def _fill(self, slots: Int64Array) -> list[Tensor]:
        """Uploads the rows; those behind them are padding."""
        rows, ones = self._rows, np.ones(len(slots), np.int64)
        tokens = token_arrays(rows, slots, ones)
        context_lens = (rows.num_computed_tokens[slots] + 1).astype(np.int32)
        columns = (context_lens, tokens.positions, tokens.slots, tokens.ids, tokens.is_ahead)
        padding = (0, self.sizes[-1] - len(slots))
        return self._inputs.uploads.upload([np.pad(column, padding) for column in columns], self._buffer)

    def _launch(self, size: int) -> None:
        """What the graph of `size` rows does."""
        device_rows, model = self._inputs.device_rows, self._model
        slots = self._slots[:size]
        batch = RaggedBatch(
            query_starts=self._query_starts[: size + 1],
            context_lens=self._context_lens[:size],
            block_tables=device_rows.tables.index_select(0, slots),
            positions=self._positions[:size],
            num_rows=size,
            num_tokens=size,
            max_query_len=1,
            max_context_len=self._rows.limits.max_model_len,
        )
        plan = model.backend.plan_attention(batch, model.cache)
        token_ids = device_rows.token_ids(self._ids[:size], slots, self._is_ahead[:size])
        hidden = model.decoder.forward(token_ids, plan, model.cache, None)
        if self._hidden is None:
            self._hidden = torch.empty(self.sizes[-1], hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
        self._hidden[:size].copy_(hidden)
        faults = getattr(plan, "faults", None)
        if faults is not None:
            self._has_faults = True
            self._faults[:size].copy_(faults)
