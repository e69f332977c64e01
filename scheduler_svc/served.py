"""What is served, as routers are told by Watch: models and their ready replicas, starting workers, aliases.

Knows what workers say of themselves, and what a model's workers would all refuse. Must not know the core or calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, KeysView, Sequence, ValuesView

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import types_pb2 as types_pb
from octavo.internal.v1 import worker_pb2 as worker_pb
from scheduler_svc.aliases import AliasBook
from scheduler_svc.core.types import RefusalReason, Refused
from scheduler_svc.parties import Replica, Router


class Served:
    """Models and starting workers, and who watches them. A model stays known when its replicas are gone."""

    def __init__(self) -> None:
        self.aliases = AliasBook()
        self._models: dict[str, pb.ServedModel] = {}
        self._starting: dict[int, pb.StartingWorker] = {}  # by connection
        self._worker_keys: list[str] = []
        self._watchers: dict[asyncio.Event, None] = {}

    @property
    def models(self) -> KeysView[str]:
        """Served names."""
        return self._models.keys()

    @property
    def starting(self) -> ValuesView[pb.StartingWorker]:
        """Workers that have not said Hello."""
        return self._starting.values()

    def add_watcher(self) -> asyncio.Event:
        """An event that is set whenever `told_to` changes; clear it before reading."""
        event = asyncio.Event()
        event.set()
        self._watchers[event] = None
        return event

    def remove_watcher(self, event: asyncio.Event) -> None:
        """Its Watch has ended."""
        del self._watchers[event]

    def wake_watchers(self) -> None:
        """There is something to see."""
        for event in self._watchers:
            event.set()

    def told_to(self, router: Router) -> pb.WatchResponse:
        """What a router is told."""
        return pb.WatchResponse(
            router_id=router.router_id,
            models=self._models.values(),
            starting=self._starting.values(),
            worker_curve_public_keys=self._worker_keys,
            aliases=self.aliases.table,
        )

    def report_starting(self, connection: int, name: str, phase: types_pb.StartPhase) -> None:
        """A worker that has not said Hello tells where it is."""
        self._starting[connection] = pb.StartingWorker(name=name, phase=phase)
        self.wake_watchers()

    def forget_starting(self, connection: int) -> None:
        """That worker is ready or gone."""
        if self._starting.pop(connection, None) is not None:
            self.wake_watchers()

    def add(self, hello: worker_pb.Hello) -> None:
        """A replica serves its model; call `note_attached` when it is among the attached."""
        served = self._models.setdefault(hello.model.name, pb.ServedModel())
        served.info.CopyFrom(hello.model)
        num_cache_tokens = hello.num_device_blocks * hello.block_size
        served.max_cached_tokens = max(served.max_cached_tokens, num_cache_tokens)

    def note_attached(self, model: str, replicas: Collection[Replica], draining: Collection[int]) -> None:
        """Looks anew at the attached replicas, of which some (ids) drain: which can serve the model at this moment, and
        whose tokens are ours."""
        ready = (each for each in replicas if not each.stalled and each.replica_id not in draining)
        self._models[model].num_ready_replicas = sum(1 for each in ready if each.hello.model.name == model)
        self._worker_keys = sorted({each.hello.curve_public_key for each in replicas} - {""})
        self.wake_watchers()

    def check(self, message: pb.GenerateRequest) -> None:
        """Raises Refused for what no worker of the model could take: it would end the attachment, and others with it.

        Routers check the same, and say it better. This holds where one of them is of another version, or broken.
        """
        served, sampling = self._models.get(message.model), message.sampling
        if served is None:
            return  # the core says so
        if message.adapter:
            raise Refused(RefusalReason.INVALID, "adapter", repr(message.adapter), "none", "the model has no adapters")
        if len(sampling.bias_token_ids) != len(sampling.bias_values):
            found, wanted = len(sampling.bias_values), len(sampling.bias_token_ids)
            raise Refused(RefusalReason.INVALID, "number of bias_values", found, wanted, "send one for each id")
        for name, ids in (
            ("prompt_token_ids", message.prompt_token_ids),
            ("prior_token_ids", message.prior_token_ids),
            ("bias_token_ids", sampling.bias_token_ids),
            ("end_token_ids", sampling.end_token_ids),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            _check_ids(name, ids, served.info.vocab_size)


def refuse_other_model(hello: worker_pb.Hello, replicas: Iterable[Replica]) -> None:
    """Raises ValueError when one of the replicas serves other weights under the same name."""
    for other in replicas:
        same_name = other.hello.model.name == hello.model.name
        if same_name and other.hello.model.fingerprint != hello.model.fingerprint:
            raise ValueError(
                f"model.fingerprint of {hello.model.name!r} is {hello.model.fingerprint}, but replica "
                f"{other.hello.name} serves that name with {other.hello.model.fingerprint}; give one of them "
                "another --served-model-name"
            )


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    largest = max(ids, default=0)
    if largest >= vocab_size:
        limit = f"the vocabulary of {vocab_size}"
        raise Refused(RefusalReason.INVALID, f"an id in {name}", largest, limit, "send ids of the vocabulary")
