"""A router process of the simulation, and the clients whose requests it holds.

Real drivers and streams; around them only what Watch and the token socket do in the real process. A client compares
all it gets with what its request yields alone, the moment it arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import grpc.aio

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import types_pb2
from router.streams.scheduler_client import GenerateCall, SchedulerClient, SchedulerState
from router.streams.sequence import SequenceDriver
from router.streams.token_inlet import Sink, TokenInlet, read_batch
from router.streams.types import (
    Completed,
    Failed,
    NewPromptLogprobs,
    NewTokens,
    Output,
    PromptDelta,
    StreamSpec,
    TokenDelta,
)
from tests.simulation.answers import Answer
from tests.simulation.network import Call, Network
from tests.simulation.schedulers import SimulatedScheduler
from tests.simulation.workers import output_logprob, prompt_logprob

_WATCH_PAUSE_S = 0.1


@dataclass(frozen=True)
class Wanted:
    """A request, and what its client will do."""

    stream_key: int
    call: pb.GenerateRequest
    """What is the same for every attempt."""
    cancel_at_tokens: int | None = None
    """The client goes away once it has so many tokens."""
    prompt_logprob_positions: range | None = None
    is_poison: bool = False
    fails_numerically: bool = False
    is_too_long: bool = False

    def spec(self, recovery_timeout_s: float, endpoint: str) -> StreamSpec:
        """The stream's part of it."""
        return StreamSpec(
            stream_key=self.stream_key,
            max_tokens=self.call.sampling.max_tokens,
            stop_token_ids=frozenset(self.call.sampling.stop_token_ids),
            recovery_timeout_s=recovery_timeout_s,
            endpoint=endpoint,
            wants_logprobs=True,
            prompt_logprob_positions=self.prompt_logprob_positions,
        )


class Client:
    """Who waits for one answer. Any output that is not the next piece of it raises."""

    def __init__(self, wanted: Wanted, answer: Answer) -> None:
        self.wanted, self._answer = wanted, answer
        self.attempt = 1
        """The latest one that went to the scheduler."""
        self.num_prompt_logprobs = 0
        self.end: Completed | Failed | str | None = None
        """How it ended; a string: the client or its router went away."""
        self.leave: Callable[[], None] = lambda: None
        """Cancels the request."""
        self.on_end: Callable[[], None] = lambda: None
        """Called once it has ended."""

    def take(self, output: Output) -> None:
        """The next output."""
        try:
            assert self.end is None, f"it ended with {self.end}, then came {output}"
            self._take(output)
        except AssertionError as error:
            raise AssertionError(f"request {self.wanted.stream_key}: {error}") from error
        if self.end is not None:
            self.on_end()

    def go(self, why: str) -> None:
        """Ends it from outside."""
        if self.end is None:
            self.end = why
            self.leave()
            self.on_end()

    def _take(self, output: Output) -> None:
        match output:
            case NewTokens():
                self._take_tokens(output)
            case NewPromptLogprobs():
                self._take_prompt_logprobs(output)
            case Completed():
                self._complete(output)
            case Failed():
                self.end = output

    @property
    def _attempts(self) -> range:
        """Whose tokens may come now. Those that waited for the prompt's logprobs may be of an earlier attempt."""
        return range(1 if self.wanted.prompt_logprob_positions else self.attempt, self.attempt + 1)

    def _take_tokens(self, tokens: NewTokens) -> None:
        wanted, answer, position = self.wanted, self._answer, tokens.position
        assert position == answer.num_tokens, f"position {position} after {answer.num_tokens} tokens"
        answer.take(tokens.token_ids, self._attempts)
        logprobs = [entry.logprob for entry in tokens.logprobs or ()]
        right = [output_logprob(token_id, position + offset) for offset, token_id in enumerate(tokens.token_ids)]
        assert logprobs == right, f"position {position}: logprobs {logprobs} instead of {right}"
        self._check_prompt_logprobs()
        if wanted.cancel_at_tokens is not None and answer.num_tokens >= wanted.cancel_at_tokens:
            asyncio.get_running_loop().call_soon(self.go, "the client went away")

    def _take_prompt_logprobs(self, found: NewPromptLogprobs) -> None:
        positions = self.wanted.prompt_logprob_positions or range(0)
        assert found.start == positions.start + self.num_prompt_logprobs, f"prompt position {found.start} is not next"
        prompt = self.wanted.call.prompt_token_ids
        for position, entry in enumerate(found.logprobs, found.start):
            right = prompt_logprob(prompt[position], position)
            assert position in positions, f"prompt position {position} was not asked for"
            assert entry.logprob == right, f"prompt position {position}: {entry} instead of {right}"
        self.num_prompt_logprobs += len(found.logprobs)

    def _check_prompt_logprobs(self) -> None:
        wanted = len(self.wanted.prompt_logprob_positions or ())
        assert self.num_prompt_logprobs == wanted, f"{self.num_prompt_logprobs} prompt logprobs of {wanted}"

    def _complete(self, completed: Completed) -> None:
        num_tokens = self._answer.num_tokens
        assert completed.num_tokens == num_tokens, f"{completed} after {num_tokens} tokens"
        # What says that it is complete may have come before a later attempt, for the prompt's logprobs.
        self._answer.end(completed.finish, completed.final_token_id, self._attempts)
        self._check_prompt_logprobs()
        self.end = completed


class SimulatedRouter:
    """One process; stands in for the scheduler client and the token inlet of its drivers."""

    def __init__(self, network: Network, scheduler: SimulatedScheduler, name: str, port: int) -> None:
        self._network, self._scheduler = network, scheduler
        self.name = name
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.state = SchedulerState()
        self.sinks: dict[int, Sink] = {}
        self.drivers: dict[SequenceDriver, Client] = {}
        self._clients: dict[int, Client] = {}
        self.watch_call: Call | None = None
        self._watch = network.loop.create_task(self._keep_watching())
        network.bind(self.endpoint, self._take_tokens)

    def open(self, client: Client, recovery_timeout_s: float) -> None:
        """Takes a client's request."""
        self._network.trace.note(f"{self.name} takes request {client.wanted.stream_key}")
        scheduler, inlet = cast(SchedulerClient, self), cast(TokenInlet, self)
        spec = client.wanted.spec(recovery_timeout_s, self.endpoint)
        driver = SequenceDriver(spec, client.wanted.call, scheduler, inlet, client.take)
        driver.on_end = lambda: self._forget(driver)
        client.leave = driver.cancel
        self.drivers[driver] = client
        self._clients[client.wanted.stream_key] = client
        driver.start()

    def die(self) -> None:
        """The process is gone, and with it what its clients waited for."""
        self._network.trace.note(f"{self.name} dies")
        self._watch.cancel()
        self._network.unbind(self.endpoint)
        for call in list(self._network.calls):
            if call.name.startswith(f"{self.name} "):
                call.lose_client()
        for client in list(self.drivers.values()):
            client.go("its router died")

    # What drivers ask of the scheduler client and of the inlet.

    def generate(self, request: pb.GenerateRequest, traceparent: str = "") -> GenerateCall:
        del traceparent
        self._network.trace.note(f"{self.name} calls for {request.stream_key}.{request.attempt}")
        self._clients[request.stream_key].attempt = request.attempt
        return self._scheduler.generate(self.name, request)

    def register(self, stream_key: int, sink: Sink) -> None:
        assert stream_key not in self.sinks, f"{stream_key} is registered twice"
        self.sinks[stream_key] = sink

    def unregister(self, stream_key: int) -> None:
        self.sinks.pop(stream_key, None)

    # Inside.

    def _forget(self, driver: SequenceDriver) -> None:
        self.drivers.pop(driver, None)

    def _take_tokens(self, batch: bytes) -> None:
        deltas: list[TokenDelta | PromptDelta] = list(read_batch(batch))
        for delta in deltas:
            sink = self.sinks.get(delta.stream_key)
            if sink is not None:
                sink(delta)

    async def _keep_watching(self) -> None:
        registration = pb.WatchRequest(token_endpoint=self.endpoint, name=self.name)
        while True:
            self.watch_call = self._scheduler.watch(self.name, registration)
            try:
                async for response in self.watch_call:
                    models = {served.info.name: served for served in response.models}
                    self._replace(SchedulerState(True, response.router_id, models, tuple(response.starting)))
            except grpc.aio.AioRpcError as error:
                self._network.trace.note(f"{self.name} lost its watch: {error.details()}")
            self._replace(replace(self.state, connected=False))
            await asyncio.sleep(_WATCH_PAUSE_S)

    def _replace(self, state: SchedulerState) -> None:
        self.state = state
        for driver in list(self.drivers):
            driver.availability(state)


def sampling_of(max_tokens: int, end_token_ids: list[int], stop_token_ids: list[int]) -> types_pb2.SamplingParams:
    """Parameters as a router resolves them, with logprobs."""
    return types_pb2.SamplingParams(
        temperature=1.0,
        top_p=1.0,
        repetition_penalty=1.0,
        max_tokens=max_tokens,
        end_token_ids=end_token_ids,
        stop_token_ids=stop_token_ids,
        num_logprobs=0,
    )
