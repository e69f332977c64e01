"""Who has to do with the scheduler: routers, replicas, and calls of live sequences. What each is told is in its queue.

Knows what a replica's silence means. Must not know the core, nor gRPC's calls.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import worker_pb2 as worker_pb
from scheduler_svc.wire import EndStatus

# A replica with an unanswered plan is stalled once its step takes longer than this, and than five times what it should
# take.
_STALL_NS = 10_000_000_000
_STALL_STEPS = 5


class UnknownRouter(Exception):
    """A request names a router that is not registered (any more): it must open Watch first."""


@dataclass(frozen=True)
class Router:
    """A registered router."""

    router_id: int
    name: str
    endpoint: worker_pb.RouterEndpoint


@dataclass
class Replica:
    """An attached worker: what it said of itself, and what goes to it."""

    replica_id: int
    hello: worker_pb.Hello
    # None: nothing follows, for the worker has nothing more to say.
    outbox: asyncio.Queue[pb.AttachResponse | None] = field(default_factory=asyncio.Queue)
    # When each unanswered plan was sent, oldest first.
    sent_ns: list[int] = field(default_factory=list)
    stalled: bool = False

    @property
    def sizes(self) -> str:
        """What it holds and does in a step, in words."""
        hello = self.hello
        return (
            f"{hello.num_device_blocks} blocks of {hello.block_size} tokens, {hello.num_host_blocks} on the host, "
            f"{hello.num_slots} slots, {hello.max_step_tokens} tokens a step"
        )

    def is_stalled(self, now: int, predicted_ns: float) -> bool:
        """Whether the oldest unanswered plan, which should take so long, has waited too long."""
        limit = max(_STALL_NS, _STALL_STEPS * predicted_ns)
        return bool(self.sent_ns) and now - self.sent_ns[0] > limit

    def note_step(self, now: int) -> None:
        """The oldest plan is answered; the next one runs from now on."""
        del self.sent_ns[0]
        if self.sent_ns:
            self.sent_ns[0] = now


@dataclass
class Call:
    """One live sequence: where its events go."""

    sequence_id: int
    router_id: int
    request_id: str
    model: str = ""
    num_tokens: int = 0
    """Prompt and prior tokens."""
    traceparent: str = ""
    """The span that the attempt belongs to; empty where it is not traced."""
    stream_key: int = 0
    events: asyncio.Queue[pb.GenerateResponse | EndStatus] = field(default_factory=asyncio.Queue)
