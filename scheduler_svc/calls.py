"""The calls of live sequences by their ids, and the names of those that ended lately, for who asks for them.

Knows routers' messages and calls; must not know the core.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from octavo.internal.v1 import scheduler_pb2 as pb
from scheduler_svc.core.types import Ended, Event
from scheduler_svc.parties import Call


class Calls:
    """One a sequence."""

    def __init__(self, max_names: int) -> None:
        """Of `max_names` ended sequences the names are kept."""
        self._max_names = max_names
        self._live: dict[int, Call] = {}
        self._ended_names: OrderedDict[int, str] = OrderedDict()

    @property
    def live(self) -> Mapping[int, Call]:
        """By sequence id."""
        return self._live

    @property
    def ended_names(self) -> Mapping[int, str]:
        """Request ids of the latest sequences that ended, by their ids."""
        return self._ended_names

    def of_router(self, router_id: int) -> list[Call]:
        """The live calls of one router."""
        return [call for call in self._live.values() if call.router_id == router_id]

    def open(self, sequence_id: int, message: pb.GenerateRequest, traceparent: str) -> Call:
        """A call for a sequence that is about to be live."""
        num_tokens = len(message.prompt_token_ids) + len(message.prior_token_ids)
        call = self._live[sequence_id] = Call(
            sequence_id,
            message.router_id,
            message.request_id,
            message.model,
            num_tokens,
            traceparent,
            message.stream_key,
        )
        return call

    def take_back(self, call: Call) -> None:
        """Its sequence was not accepted."""
        del self._live[call.sequence_id]

    def end(self, sequence_id: int) -> Call | None:
        """The call of a sequence that is live no longer; None if it was not."""
        call = self._live.pop(sequence_id, None)
        if call is not None:
            self._ended_names[sequence_id] = call.request_id
            if len(self._ended_names) > self._max_names:
                self._ended_names.popitem(last=False)
        return call

    def in_flight(self, events: Iterable[Event]) -> Iterator[tuple[int, int]]:
        """Stream keys of those that a replica was lost under, with the rows that were in flight."""
        for event in events:
            call = self._live.get(event.sequence_id)
            lost = event.replica_lost if isinstance(event, Ended) else None
            if call is not None and lost is not None and lost.rows_in_step:
                yield call.stream_key, lost.rows_in_step
