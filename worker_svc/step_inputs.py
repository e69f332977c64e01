"""A step's inputs on the device: arrays gathered here, tables that stay there, tokens that never came here.

The slow, obvious twin is `batch.build_step_input`, which is what a device that does not run ahead uses. Knows the row
table and the kernel API's batches; decides nothing.

    on the device, by slot   tables [slots, max_blocks]   last_token_ids [slots]: what each row sampled last
    uploaded for a step      query_starts, context_lens, slots of its rows; ids, positions, slots of its tokens
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.api import RaggedBatch, SamplingBatch
from worker_svc.batch import StepInput, build_step_input
from worker_svc.device.api import Device
from worker_svc.device.staging import Uploads
from worker_svc.rows import Int32Array, Int64Array, RowTable


class StepInputs(Protocol):
    """Where a step's inputs come from."""

    def begin_step(self) -> None:
        """The step before the last has been settled."""
        ...

    def build(self, slots: Int64Array, counts: Int64Array) -> StepInput:
        """The next `counts[r]` uncomputed tokens of each row; see `batch.build_step_input`."""
        ...

    def sampling(self, batch: SamplingBatch) -> SamplingBatch:
        """The batch with its tensors on the device."""
        ...

    def indexes(self, values: Int64Array) -> Tensor:
        """Indexes into the step's tokens or rows, on the device."""
        ...

    def remember(self, slots: Int64Array, token_ids: Tensor) -> None:
        """What these rows have sampled, of which the next step may be made before it is known here."""
        ...


class HostInputs:
    """For a device whose memory is the host's, and which never runs ahead."""

    def __init__(self, rows: RowTable) -> None:
        self._rows = rows

    def begin_step(self) -> None:
        pass

    def build(self, slots: Int64Array, counts: Int64Array) -> StepInput:
        return build_step_input(self._rows, slots, counts)

    def sampling(self, batch: SamplingBatch) -> SamplingBatch:
        return batch

    def indexes(self, values: Int64Array) -> Tensor:
        return torch.from_numpy(values)

    def remember(self, slots: Int64Array, token_ids: Tensor) -> None:
        pass


@dataclass(frozen=True)
class TokenArrays:
    """The tokens of a step, host side, [num_tokens] each; `is_ahead` where the id is on the device alone."""

    ids: Int32Array
    positions: Int32Array
    slots: Int32Array
    is_ahead: npt.NDArray[np.bool_]


def token_arrays(rows: RowTable, slots: Int64Array, counts: Int64Array) -> TokenArrays:
    """The next `counts[r]` uncomputed tokens of each row."""
    computed = rows.num_computed_tokens[slots]
    starts = np.cumsum(counts) - counts
    positions = np.arange(int(counts.sum())) + np.repeat(computed - starts, counts)
    token_slots = np.repeat(slots, counts)
    return TokenArrays(
        ids=rows.token_ids[token_slots, positions],
        positions=positions.astype(np.int32),
        slots=token_slots.astype(np.int32),
        is_ahead=positions >= rows.num_settled_tokens[token_slots],
    )


class DeviceRows:
    """What the device keeps of each slot: its block table, brought up to date by what changed, and its last token."""

    def __init__(self, rows: RowTable, device: Device, uploads: Uploads) -> None:
        limits = rows.limits
        self._rows = rows
        self._uploads = uploads
        place = device.torch_device
        self.tables = torch.zeros(limits.num_slots, limits.max_blocks_per_row, dtype=torch.int32, device=place)
        self.last_token_ids = torch.zeros(limits.num_slots, dtype=torch.int64, device=place)
        # By slot: blocks of the table that are there, of which of the slot's sequences.
        self._num_blocks = np.zeros(limits.num_slots, np.int64)
        self._num_admissions = np.zeros(limits.num_slots, np.int64)

    def update(self, slots: Int64Array) -> None:
        """Brings these slots' tables up to date."""
        rows = self._rows
        is_same = self._num_admissions[slots] == rows.num_admissions[slots]
        first = np.where(is_same, self._num_blocks[slots], 0)
        counts = rows.num_blocks[slots] - first
        num_new = int(counts.sum())
        if not num_new:
            return
        self._num_admissions[slots] = rows.num_admissions[slots]
        self._num_blocks[slots] = rows.num_blocks[slots]
        changed = np.repeat(slots, counts)
        columns = np.arange(num_new) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        places, blocks = self._uploads.upload(
            [changed * self.tables.shape[1] + columns, rows.block_tables[changed, columns]]
        )
        self.tables.view(-1).index_copy_(0, places, blocks)

    def token_ids(self, ids: Tensor, slots: Tensor, is_ahead: Tensor) -> Tensor:
        """[num_tokens] int64: the given ids, but the slot's last token where that is not known to the host."""
        return torch.where(is_ahead, self.last_token_ids[slots], ids.long())


class DeviceInputs:
    """For a device with memory of its own, which runs ahead of the host."""

    def __init__(self, rows: RowTable, device: Device) -> None:
        self.uploads = Uploads(device)
        self.device_rows = DeviceRows(rows, device, self.uploads)
        self._rows = rows
        # The last batch and where its tensors went: most stay the same from one decode step to the next.
        self._sampling: tuple[SamplingBatch, SamplingBatch] | None = None

    def begin_step(self) -> None:
        self.uploads.begin_step()

    def build(self, slots: Int64Array, counts: Int64Array) -> StepInput:
        self.device_rows.update(slots)
        tokens = token_arrays(self._rows, slots, counts)
        context_lens = (self._rows.num_computed_tokens[slots] + counts).astype(np.int32)
        query_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        longest = int(context_lens.max())
        starts, contexts, row_slots, ids, positions, token_slots, is_ahead = self.uploads.upload(
            [
                query_starts,
                context_lens,
                slots.astype(np.int32),
                tokens.ids,
                tokens.positions,
                tokens.slots,
                tokens.is_ahead,
            ]
        )
        max_blocks = -(-longest // self._rows.limits.block_size)
        batch = RaggedBatch(
            query_starts=starts,
            context_lens=contexts,
            block_tables=self.device_rows.tables[:, :max_blocks].index_select(0, row_slots),
            positions=positions,
            num_rows=len(slots),
            num_tokens=len(tokens.ids),
            max_query_len=int(counts.max()),
            max_context_len=longest,
        )
        return StepInput(self.device_rows.token_ids(ids, token_slots, is_ahead), batch)

    def sampling(self, batch: SamplingBatch) -> SamplingBatch:
        """Uploads what is not the very tensor of the last step, and the positions, which change in place."""
        before, there = self._sampling or (None, None)
        changed = [
            field.name
            for field in fields(batch)
            if isinstance(value := getattr(batch, field.name), Tensor)
            and (field.name == "positions" or before is None or value is not getattr(before, field.name))
        ]
        moved = self.uploads.upload([getattr(batch, name).numpy() for name in changed])
        kept = batch if there is None else replace(there, num_top=batch.num_top, vocab_size=batch.vocab_size)
        found = replace(kept, **dict(zip(changed, moved, strict=True)))  # type: ignore[arg-type]
        self._sampling = batch, found
        return found

    def indexes(self, values: Int64Array) -> Tensor:
        return self.uploads.upload([values])[0]

    def remember(self, slots: Int64Array, token_ids: Tensor) -> None:
        self.device_rows.last_token_ids.index_copy_(0, self.indexes(slots), token_ids)
