"""Whether this router can have a token produced now, and if not, why and how far the start is.

Pure: from what is known of each model, the scheduler's state and this process's own start to one answer, which the
surfaces show as HTTP, gRPC health and refusals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from octavo.internal.v1 import scheduler_pb2, types_pb2
from octavo.phases import Phase
from router.models.aliases import Alias
from router.streams.scheduler_client import SchedulerState

_MAX_PLACES = 4


@dataclass(frozen=True)
class ListedModel:
    """A name that clients may use, and the model behind it: of several behind an alias, the one that takes least."""

    name: str
    info: types_pb2.ModelInfo
    is_ready: bool
    weights: Mapping[str, float] | None = None
    """The models of an alias; None for a model."""


@dataclass(frozen=True)
class Readiness:
    """`reason` says why not, for people; empty when ready. `phases` are those of every start."""

    ready: bool
    reason: str = ""
    phases: tuple[dict[str, Any], ...] = field(default=())
    models: tuple[str, ...] = ()
    """What workers offer."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why not, for each model that this router speaks for."""


def summarize(reasons: Mapping[str, str], state: SchedulerState, phases: Iterable[tuple[str, Phase]]) -> Readiness:
    """One answer for all models: ready as soon as one is. Without one, the first model's reason counts.

    Phases come with their process.
    """
    ready = not all(reasons.values())
    shown = tuple(_show(process, phase) for process, phase in phases)
    return Readiness(ready, "" if ready else next(iter(reasons.values())), shown, tuple(sorted(state.models)), reasons)


def list_aliases(models: Sequence[ListedModel], aliases: Mapping[str, Alias]) -> list[ListedModel]:
    """The aliases of which some model is listed, by name: each with the numbers of the model that takes least."""
    by_name, found = {model.name: model for model in models}, []
    for name, alias in sorted(aliases.items()):
        members = [by_name[model] for model in alias.weights if model in by_name]
        if members:
            least = min(members, key=lambda member: member.info.max_model_len)
            is_ready = any(member.is_ready for member in members)
            found.append(ListedModel(name, least.info, is_ready, alias.weights))
    return found


def judge(model: str, tokenizer_hash: str | None, state: SchedulerState, *, draining: bool) -> str:
    """Why no token of `model` can be produced now; empty when one can. The hash is None while this router loads."""
    if draining:
        return "this router is draining"
    if tokenizer_hash is None:
        return "this router is loading its tokenizer"
    if not state.connected:
        return "the scheduler is not connected"
    served = state.models.get(model)
    if served is None:
        others = f"; workers serve {', '.join(sorted(state.models))}" if state.models else ""
        return f"no worker has offered the model {model} yet{_where(state.starting)}{others}"
    if served.info.tokenizer_hash != tokenizer_hash:
        return (
            f"the workers' tokenizer of {model} ({served.info.tokenizer_hash[:12]}) is not this router's "
            f"({tokenizer_hash[:12]}); start both with the same model files"
        )
    if served.num_ready_replicas == 0:
        return f"no replica of {model} is ready"
    return ""


def _where(starting: Sequence[scheduler_pb2.StartingWorker]) -> str:
    """How far the workers' starts are; empty when none starts."""
    if not starting:
        return ""
    places = [" ".join(filter(None, (worker.phase.name, worker.phase.detail))) for worker in starting]
    return f"; {len(starting)} starting ({', '.join(places[:_MAX_PLACES])})"


def _show(process: str, phase: Phase) -> dict[str, Any]:
    return {
        "process": process,
        "name": phase.name,
        "seconds": round(phase.seconds, 3),
        "ended": phase.ended,
        "done": phase.done,
        "total": phase.total,
    }
