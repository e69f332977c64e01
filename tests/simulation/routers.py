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
from router.scheduler_client import GenerateCall, SchedulerClient, SchedulerState
from router.sequence import SequenceDriver
from router.stream_types import (
    Completed,
    Failed,
    Finish,
    NewPromptLogprobs,
    NewTokens,
    Output,
    PromptDelta,
    StreamSpec,
    TokenDelta,
)
from router.token_inlet import Sink, TokenInlet, read_batch
from tests.simulation.network import Call, Network
from tests.simulation.schedulers import SimulatedScheduler
from tests.simulation.workers import output_logprob, prompt_logprob

_WATCH_PAUSE_S = 0.1


@dataclass(frozen=True)
class Wanted:
    """A request, and the answer that it has alone."""

    stream_key: int
    call: pb.GenerateRequest
    """What is the same for every attempt."""
    answer: tuple[int, ...]
    finish: Finish
    final_token_id: int | None
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

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.num_tokens = 0
        self.num_prompt_logprobs = 0
        self.end: Completed | Failed | str | None = None
        """How it ended; a string: the client or its router went away."""
        self.leave: Callable[[], None] = lambda: None
        """Cancels the request."""

    def take(self, output: Output) -> None:
        """The next output."""
        name = f"request {self.wanted.stream_key}"
        assert self.end is None, f"{name} ended with {self.end}, then came {output}"
        match output:
            case NewTokens():
                self._take_tokens(name, output)
            case NewPromptLogprobs():
                self._take_prompt_logprobs(name, output)
            case Completed():
                self._complete(name, output)
            case Failed():
                self.end = output

    def go(self, why: str) -> None:
        """Ends it from outside."""
        if self.end is None:
            self.end = why
            self.leave()

    def _take_tokens(self, name: str, tokens: NewTokens) -> None:
        wanted = self.wanted
        place = f"{name}, position {tokens.position}"
        assert tokens.position == self.num_tokens, f"{place}: {self.num_tokens} tokens came before"
        answer = wanted.answer[tokens.position : tokens.position + len(tokens.token_ids)]
        assert tokens.token_ids == answer, f"{place}: got {tokens.token_ids}, alone it is {answer}"
        logprobs = [entry.logprob for entry in tokens.logprobs or ()]
        right = [output_logprob(token_id, tokens.position + offset) for offset, token_id in enumerate(answer)]
        assert logprobs == right, f"{place}: logprobs {logprobs} instead of {right}"
        assert self.num_prompt_logprobs == len(wanted.prompt_logprob_positions or ()), f"{place}: before the prompt's"
        self.num_tokens += len(answer)
        if wanted.cancel_at_tokens is not None and self.num_tokens >= wanted.cancel_at_tokens:
            asyncio.get_running_loop().call_soon(self.go, "the client went away")

    def _take_prompt_logprobs(self, name: str, found: NewPromptLogprobs) -> None:
        positions = self.wanted.prompt_logprob_positions or range(0)
        place = f"{name}, prompt position {found.start}"
        assert found.start == positions.start + self.num_prompt_logprobs, f"{place}: {self.num_prompt_logprobs} came"
        prompt = self.wanted.call.prompt_token_ids
        for offset, entry in enumerate(found.logprobs):
            position = found.start + offset
            right = prompt_logprob(prompt[position], position)
            assert position in positions, f"{place}: {position} was not asked for"
            assert entry.logprob == right, f"{place}: {entry} instead of {right}"
        self.num_prompt_logprobs += len(found.logprobs)

    def _complete(self, name: str, completed: Completed) -> None:
        wanted = self.wanted
        assert self.num_tokens == len(wanted.answer), f"{name}: {self.num_tokens} tokens of {len(wanted.answer)}"
        assert completed.num_tokens == self.num_tokens, f"{name}: {completed} after {self.num_tokens} tokens"
        assert completed.finish is wanted.finish, f"{name}: {completed}, alone it ends with {wanted.finish}"
        if completed.final_token_id is not None:
            assert completed.final_token_id == wanted.final_token_id, f"{name}: {completed} for {wanted.final_token_id}"
        assert self.num_prompt_logprobs == len(wanted.prompt_logprob_positions or ()), f"{name}: without the prompt's"
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

    def generate(self, request: pb.GenerateRequest) -> GenerateCall:
        self._network.trace.note(f"{self.name} calls for {request.stream_key}.{request.attempt}")
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
