"""The requests of a recording under other limits: taken out of it, and simulated with what its steps cost.

A changed decision changes every step after it, so recorded results do not fit any more: replicas are simulated, with a
cost model fitted to the recorded steps. Both sides of a comparison are simulated alike.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cost_model import CostModel
from scheduler_svc.contents import Contents
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import ReplicaSpec
from scheduler_svc.measures import SequenceTimes, Summary, summarize
from scheduler_svc.recording import Recording, RecordingError, from_fields
from scheduler_svc.replay import StepSample, num_tokens, request_of
from scheduler_svc.simulation import Arrival, Simulation, Stay


@dataclass(frozen=True)
class Workload:
    """What came to a scheduler, and what it had to serve it with."""

    arrivals: tuple[Arrival, ...]
    stays: tuple[Stay, ...]
    contents: Contents

    def simulate(self, limits: CoreLimits, costs: CostModel) -> Summary:
        """What it is like under these limits."""
        simulation = Simulation(Scheduler(limits), costs, self.contents.token_id)
        return summarize(simulation.run(self.arrivals, self.stays).times.values())


def workload_of(recording: Recording, times: dict[int, SequenceTimes] | None) -> Workload:
    """The requests and replicas of a recording; `times` from its replay, where it can be replayed.

    Without them an answer's length is that of its recorded blocks, or what the request allows. Raises RecordingError if
    no replica or no request is left in it.
    """
    contents = Contents(recording.records)
    cancels = {record.cancel: record.now_ns for record in recording.records if record.HasField("cancel")}
    arrivals = []
    for record in recording.records:
        if not record.HasField("submit"):
            continue
        recorded = record.submit
        tokens = array("I", recorded.token_ids) or contents.tokens(recorded.sequence_id, 0, num_tokens(recorded))
        request = request_of(recorded, tokens)
        known = times.get(recorded.sequence_id) if times is not None else None
        cancel_at_ns = cancels.get(recorded.sequence_id)
        if known is not None and known.ended_ns is not None and not known.was_cut and not known.was_refused:
            num_output, cancel_at_ns = recorded.num_prior_tokens + known.num_output_tokens, None
        elif known is None and cancel_at_ns is None:
            num_output = contents.num_tokens(recorded.sequence_id) - recorded.num_prompt_tokens
        else:
            num_output = 0
        arrivals.append(
            Arrival(record.now_ns, request, num_output if num_output > 0 else request.max_tokens, cancel_at_ns)
        )
    stays = _stays(recording)
    if not arrivals or not stays:
        raise RecordingError(f"it holds {len(arrivals)} requests and {len(stays)} replicas; a comparison needs both")
    return Workload(tuple(arrivals), tuple(stays), contents)


def _stays(recording: Recording) -> list[Stay]:
    records = recording.records
    begun_ns = records[0].now_ns if records else 0
    early = [(begun_ns, from_fields(ReplicaSpec, replica.fields)) for replica in recording.header.replicas]
    ends = {record.detach: record.now_ns for record in records if record.HasField("detach")}
    specs = [
        (record.now_ns, from_fields(ReplicaSpec, record.attach.fields))
        for record in records
        if record.HasField("attach")
    ]
    return [Stay(spec, begun_ns, ends.get(spec.replica_id)) for begun_ns, spec in (*early, *specs)]


def fit_costs(steps: Sequence[StepSample]) -> CostModel:
    """The cost model that fits recorded steps best, by least squares over its four parts, none of them negative.

    Raises RecordingError where no step tells a duration.
    """
    measured = [step for step in steps if step.duration_ns > 0]
    if not measured:
        raise RecordingError("no recorded step tells how long it took; give --costs")
    columns = [
        [1.0 for _ in measured],
        [float(step.num_prefill_tokens) for step in measured],
        [float(step.num_decode_rows) for step in measured],
        [float(step.num_kv_tokens) for step in measured],
    ]
    wanted = [float(step.duration_ns) for step in measured]
    chosen = [index for index, column in enumerate(columns) if any(column)]
    while True:
        found = dict(zip(chosen, _least_squares([columns[index] for index in chosen], wanted), strict=True))
        worst = min(chosen, key=lambda index: found[index])
        if found[worst] >= 0 or len(chosen) == 1:
            break
        chosen.remove(worst)
    step_ns, token_ns, row_ns, kv_ns = (max(0.0, found.get(index, 0.0)) for index in range(4))
    # A model of which nothing is known computes prompts as fast as it decodes.
    per_token_ns = token_ns or row_ns or step_ns
    return CostModel(
        prefill_tokens_per_s=1e9 / per_token_ns if per_token_ns else CostModel.prefill_tokens_per_s,
        step_ms=step_ns / 1e6,
        row_us=row_ns / 1e3,
        kv_token_ns=kv_ns,
    )


def _least_squares(columns: list[list[float]], wanted: list[float]) -> list[float]:
    """Factors of the columns whose sum comes closest to what is wanted; columns that say the same share theirs."""
    size = len(columns)
    scales = [max(map(abs, column)) for column in columns]
    rows = [
        [sum(a * b for a, b in zip(one, other, strict=True)) / scales[i] / scales[j] for j, other in enumerate(columns)]
        + [sum(a * b for a, b in zip(one, wanted, strict=True)) / scales[i]]
        for i, one in enumerate(columns)
    ]
    for index in range(size):
        rows[index][index] *= 1 + 1e-9  # keeps columns that say the same from dividing by zero
    for index in range(size):
        pivot = max(range(index, size), key=lambda row: abs(rows[row][index]))
        rows[index], rows[pivot] = rows[pivot], rows[index]
        for other in range(size):
            if other != index and rows[index][index]:
                factor = rows[other][index] / rows[index][index]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[index], strict=True)]
    return [rows[i][size] / rows[i][i] / scales[i] if rows[i][i] else 0.0 for i in range(size)]
