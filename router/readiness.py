"""Whether this router can have a token produced now, and if not, why and how far the start is.

Pure: from what is known of the model, the scheduler's state and this process's own start to one answer, which the
surfaces show as HTTP, gRPC health and refusals.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.internal.v1 import types_pb2
from octavo.phases import Phase
from router.streams.scheduler_client import SchedulerState

_COUNTS = re.compile(r"(\d+)/(\d+)")


@dataclass(frozen=True)
class Readiness:
    """`reason` says why not, for people; empty when ready. `phases` are those of every process that starts."""

    ready: bool
    reason: str = ""
    phases: tuple[dict[str, Any], ...] = field(default=())
    models: tuple[str, ...] = ()


def judge(
    model: str, tokenizer_hash: str | None, state: SchedulerState, own_phases: Iterable[Phase], *, draining: bool
) -> Readiness:
    """The answer for `model`; `tokenizer_hash` is None while this router is still loading."""
    reason = _reason(model, tokenizer_hash, state, draining=draining)
    phases = [_own_phase(phase) for phase in own_phases]
    phases += [_worker_phase(worker.name, worker.phase) for worker in state.starting]
    return Readiness(not reason, reason, tuple(phases), tuple(sorted(state.models)))


def _reason(model: str, tokenizer_hash: str | None, state: SchedulerState, *, draining: bool) -> str:
    if draining:
        return "this router is draining"
    if tokenizer_hash is None:
        return "this router is loading its tokenizer"
    if not state.connected:
        return "the scheduler is not connected"
    served = state.models.get(model)
    if served is None:
        others = f"; workers serve {', '.join(sorted(state.models))}" if state.models else ""
        starting = f"; {len(state.starting)} starting" if state.starting else ""
        return f"no worker has offered the model {model} yet{starting}{others}"
    if served.info.tokenizer_hash != tokenizer_hash:
        return (
            f"the workers' tokenizer of {model} ({served.info.tokenizer_hash[:12]}) is not this router's "
            f"({tokenizer_hash[:12]}); start both with the same model files"
        )
    if served.num_ready_replicas == 0:
        return f"no replica of {model} is ready"
    return ""


def _own_phase(phase: Phase) -> dict[str, Any]:
    return {
        "process": "router",
        "name": phase.name,
        "seconds": round(phase.seconds, 3),
        "ended": phase.ended,
        "done": phase.done,
        "total": phase.total,
    }


def _worker_phase(process: str, phase: types_pb2.StartPhase) -> dict[str, Any]:
    counts = _COUNTS.match(phase.detail)
    return {
        "process": process,
        "name": phase.name,
        "seconds": round(phase.seconds, 3),
        "ended": phase.name == "ready",
        "done": int(counts[1]) if counts else None,
        "total": int(counts[2]) if counts else None,
        "detail": phase.detail,
    }
