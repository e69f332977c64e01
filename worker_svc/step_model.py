"""From the rows of a step to the hidden states that are wanted of it: as a graph where there is one, else by calls.

Knows inputs, decoder and graphs; must not know plans, sampling or what becomes of the states.
"""

from __future__ import annotations

import torch

from worker_svc.decode_graphs import DecodedRows, DecodeGraphs, GraphModel
from worker_svc.device.api import Device
from worker_svc.rows import Int64Array, RowTable
from worker_svc.step_inputs import DeviceInputs, HostInputs, StepInputs


class StepModel:
    """One rank's model over its rows."""

    def __init__(self, device: Device, rows: RowTable, model: GraphModel, sizes: tuple[int, ...]) -> None:
        """`sizes` are the rows of the graphs that `capture` will make, none for none."""
        self._device, self._model = device, model
        self._graphs: DecodeGraphs | None = None
        if not device.runs_ahead:
            self.inputs: StepInputs = HostInputs(rows)
            return
        inputs = DeviceInputs(rows, device)
        self.inputs = inputs
        if sizes:
            self._graphs = DecodeGraphs(device, rows, inputs, model, sizes)

    def capture(self) -> None:
        """Makes the graphs; without any it does nothing."""
        if self._graphs is not None:
            self._graphs.capture()

    def forward(self, slots: Int64Array, counts: Int64Array, wanted: Int64Array) -> DecodedRows:
        """Hidden states of the wanted tokens of the step, in the order of `wanted`."""
        is_all = len(wanted) == int(counts.sum()) and bool((wanted[1:] > wanted[:-1]).all())
        graphs = self._graphs
        if graphs is not None and graphs.takes(counts):
            with self._device.range(f"decode of {len(slots)} rows"):
                found = graphs.run(slots)
            return found if is_all else DecodedRows(found.hidden[self.inputs.indexes(wanted)], found.faults)
        with self._device.range("inputs"):
            step_input = self.inputs.build(slots, counts)
            attention = self._model.backend.plan_attention(step_input.batch, self._model.cache)
        with self._device.range(f"{step_input.batch.num_tokens} tokens of {len(slots)} rows"):
            hidden = self._model.decoder.forward(
                step_input.token_ids, attention, self._model.cache, None if is_all else self.inputs.indexes(wanted)
            )
        faults: torch.Tensor | None = getattr(attention, "faults", None)
        return DecodedRows(hidden, faults)
