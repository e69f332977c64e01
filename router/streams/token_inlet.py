"""Where tokens come in: a ZeroMQ PULL socket that workers push token batches to, dispatched by stream key.

Knows the wire form of a TokenBatch and who waits for which key; knows no text, request or scheduler. What does not
parse is dropped and counted, for anyone who reaches the port can send it; nothing of it is logged but its size.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import zmq
import zmq.asyncio
from google.protobuf.message import DecodeError

from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.process import StartError
from router.streams.types import Finish, PromptDelta, TokenDelta, TokenLogprob
from router.streams.worker_keys import ZAP_DOMAIN, WorkerKeys

_LOG = logging.getLogger(__name__)

LONGEST_MESSAGE_BYTES = 64 * 2**20

Sink: TypeAlias = Callable[[TokenDelta | PromptDelta], None]


class MalformedBatch(Exception):
    """Bytes that are no TokenBatch, or one whose parallel arrays disagree."""


class StreamKeys:
    """Keys that no other router start shares: random high bits and a counter."""

    def __init__(self) -> None:
        self._start = secrets.randbits(64)
        self._counter = itertools.count()

    def draw(self) -> int:
        """The next 64-bit key."""
        return (self._start + next(self._counter)) % 2**64


def is_every_address(endpoint: str) -> bool:
    """Whether a ZeroMQ endpoint means every address of the machine, so that nobody can be sent to it."""
    return endpoint.startswith(("tcp://0.0.0.0:", "tcp://[::]:", "tcp://*:"))


class TokenInlet:
    """The socket and the table of who waits. Create it in a running event loop."""

    def __init__(self, listen: str, advertise: str | None = None, *, curve: bool = False) -> None:
        """Bind. Raises StartError naming the endpoint and what is wrong with it.

        `advertise` is where workers are told to send tokens to, the port `*` standing for the one that was bound; by
        default what was bound. With `curve` messages are encrypted and taken from the workers of `authorise` alone.
        """
        self._sinks: dict[int, Sink] = {}
        self.num_dropped_messages = 0
        # Authentication is by context, so a socket that has it needs a context of its own.
        context = zmq.Context() if curve else zmq.Context.instance()
        self.worker_keys = WorkerKeys(zmq.asyncio.Context(context)) if curve else None
        self._socket = context.socket(zmq.PULL)
        self.curve_public_key = self._become_curve_server() if curve else ""
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, LONGEST_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.IPV6, int("[" in listen))
        try:
            self._socket.bind(listen)
        except zmq.ZMQError as error:
            self._socket.close()
            raise StartError(f"--token-listen {listen}: cannot be bound ({error}); name a free endpoint") from None
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        if advertise is None and is_every_address(bound):
            self._socket.close()
            raise StartError(f"--token-listen {listen} is every address; name the one for workers by --token-advertise")
        self.endpoint = bound if advertise is None else re.sub(r":\*$", bound[bound.rindex(":") :], advertise)
        """Where workers are told to send tokens to."""

    def authorise(self, worker_keys: Iterable[str]) -> None:
        """Take tokens from the workers with these CURVE keys alone. Does nothing where the socket is plain."""
        if self.worker_keys is not None:
            self.worker_keys.authorise(worker_keys)

    def register(self, stream_key: int, sink: Sink) -> None:
        """Tokens of this key go to `sink` from now on."""
        self._sinks[stream_key] = sink

    def unregister(self, stream_key: int) -> None:
        """Tokens of this key are dropped from now on."""
        self._sinks.pop(stream_key, None)

    async def run(self) -> None:
        """Receive until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            if self.worker_keys is not None:
                tasks.create_task(self.worker_keys.run())
            tasks.create_task(self._receive())

    async def _receive(self) -> None:
        # The socket is read where it becomes readable: an asyncio one makes futures and tasks of every message.
        loop = asyncio.get_running_loop()
        broken: asyncio.Future[None] = loop.create_future()
        is_next_due = False

        def take_next() -> None:
            """One message, for a flood of them must not keep the loop from everything else."""
            nonlocal is_next_due
            is_next_due = False
            if broken.done():
                return
            try:
                if self._has_message():
                    self.take(self._socket.recv_multipart(zmq.NOBLOCK))
                    is_next_due = self._has_message()
            except Exception as error:
                broken.set_exception(error)
            if is_next_due:
                loop.call_soon(take_next)  # ZeroMQ tells of the first message that waits, and of no other

        def on_readable() -> None:
            """The descriptor stays readable until ZeroMQ looks at it, which it does not do for every message."""
            if not is_next_due:
                take_next()

        descriptor = self._socket.fileno()
        loop.add_reader(descriptor, on_readable)
        try:
            on_readable()
            await broken
        finally:
            broken.cancel()
            loop.remove_reader(descriptor)

    def _has_message(self) -> bool:
        # Asking first is cheaper than trying: what misses would be an exception.
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def take(self, frames: Sequence[bytes]) -> None:
        """Dispatch one message."""
        try:
            if len(frames) != 1:
                raise MalformedBatch(f"{len(frames)} frames")
            deltas = read_batch(frames[0])
        except MalformedBatch as error:
            self.num_dropped_messages += 1
            size = sum(map(len, frames))
            _LOG.warning("dropped a message of %d bytes on the token socket: %s", size, error)
            return
        sinks = self._sinks
        for delta in deltas:
            sink = sinks.get(delta.stream_key)
            if sink is not None:
                sink(delta)

    def close(self) -> None:
        """Unbind; the endpoint is free afterwards."""
        self._socket.close()
        if self.worker_keys is not None:
            self.worker_keys.close()

    def _become_curve_server(self) -> str:
        """Keys of this start; returns the public one, Z85."""
        public, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.zap_domain = ZAP_DOMAIN
        return public.decode("ascii")


def read_batch(data: bytes) -> list[TokenDelta | PromptDelta]:
    """What a TokenBatch says, prompt logprobs first. Raises MalformedBatch."""
    batch = worker_pb2.TokenBatch()
    try:
        batch.ParseFromString(data)
    except DecodeError:
        raise MalformedBatch("not a TokenBatch") from None
    count = len(batch.stream_keys)
    entries = batch.entry_positions or (0,) * count
    columns = (batch.attempts, batch.positions, batch.num_tokens, batch.finish_reasons, batch.final_token_ids, entries)
    if any(len(column) != count for column in columns) or sum(batch.num_tokens) != len(batch.token_ids):
        raise MalformedBatch("parallel arrays of different lengths")
    deltas: list[TokenDelta | PromptDelta] = [_read_prompt(entry) for entry in batch.prompt_logprobs]
    logprobs = {entry.index: entry for entry in batch.logprobs}
    ids, offset = tuple(batch.token_ids), 0
    rows = zip(batch.stream_keys, *columns, strict=True)
    for index, (key, attempt, position, num, reason, final, entry_position) in enumerate(rows):
        tokens = ids[offset : offset + num]
        offset += num
        if not reason and not logprobs:  # nearly all
            deltas.append(TokenDelta._make((key, attempt, position, tokens, None, None, None, entry_position)))
            continue
        finish = _FINISH.get(reason)
        ended_by_token = finish in (Finish.END_TOKEN, Finish.STOP_TOKEN)
        found = _read_output(logprobs[index], tokens) if index in logprobs else None
        end = final if ended_by_token else None
        deltas.append(TokenDelta(key, attempt, position, tokens, found, finish, end, entry_position))
    return deltas


_FINISH: Mapping[int, Finish] = {
    types_pb2.FINISH_REASON_END_TOKEN: Finish.END_TOKEN,
    types_pb2.FINISH_REASON_STOP_TOKEN: Finish.STOP_TOKEN,
    types_pb2.FINISH_REASON_LENGTH: Finish.LENGTH,
    types_pb2.FINISH_REASON_NUMERIC_ERROR: Finish.NUMERIC_ERROR,
    types_pb2.FINISH_REASON_GRAMMAR_ERROR: Finish.GRAMMAR_ERROR,
}


def read_finish(reason: int) -> Finish:
    """The finish reason of an event. Raises KeyError for one that is none."""
    return _FINISH[reason]


def _read_output(entry: worker_pb2.OutputLogprobs, tokens: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """One sequence's logprobs; entries beyond its tokens (an end token's) are left out."""
    if len(entry.sampled) < len(tokens):
        raise MalformedBatch("fewer logprobs than tokens")
    tops = _read_tops(entry.num_top, entry.top_token_ids, entry.top, len(entry.sampled))
    return tuple(
        TokenLogprob(token_id, logprob, top)
        for token_id, logprob, top in zip(tokens, entry.sampled, tops, strict=False)
    )


def _read_prompt(entry: worker_pb2.PromptLogprobs) -> PromptDelta:
    """Prompt logprobs come without ids: whoever asked knows the prompt."""
    tops = _read_tops(entry.num_top, entry.top_token_ids, entry.top, len(entry.tokens))
    found = tuple(TokenLogprob(None, logprob, top) for logprob, top in zip(entry.tokens, tops, strict=True))
    return PromptDelta(entry.stream_key, entry.attempt, entry.start, found)


def _read_tops(
    num_top: int, ids: Sequence[int], values: Sequence[float], count: int
) -> list[tuple[tuple[int, float], ...]]:
    if len(ids) != num_top * count or len(values) != num_top * count:
        raise MalformedBatch("alternatives that are not num_top per token")
    pairs = tuple(zip(ids, values, strict=True))
    return [pairs[i * num_top : (i + 1) * num_top] for i in range(count)]
