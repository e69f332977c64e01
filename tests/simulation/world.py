"""A whole system under one seed: processes, clients and misfortunes, and what must be true whatever they do.

Knows every part and changes none. Until the storm is over requests arrive and misfortunes happen; then the network is
faithful, everything must come to its end within a bounded time, and nothing may be left behind.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from dataclasses import dataclass, replace

from router.errors import ErrorKind
from router.streams.types import Completed, Failed, Finish
from tests.simulation.answers import Answer
from tests.simulation.network import Network, Trace
from tests.simulation.routers import Client, SimulatedRouter
from tests.simulation.scenario import MODEL, POISON_TOKEN_ID, Misfortune, Scenario, draw
from tests.simulation.schedulers import SimulatedScheduler
from tests.simulation.virtual_time import LiveLock, VirtualLoop, run_virtually
from tests.simulation.workers import SimulatedWorker, WorkerDied

_RECOVERY_TIMEOUT_S = 10_000.0
_CALM_BOUND_S = 300.0
"""Virtual time after the storm within which every request must have ended."""
_HARMLESS = {Misfortune.CLIENT_LEAVES, Misfortune.CACHE_RESET, Misfortune.DRAIN, Misfortune.UPDATE}
"""What leaves everyone else's attempts alone."""
_RELEASE_S = 1.0
"""Time within which a request that was cut off is gone from the core."""
_COMPLETE_RELEASE_S = 3.5
"""The same for a complete one, whose call may take its time to end by itself."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Outcome:
    """What came of a seed."""

    digest: str
    ends: Counter[str]
    """How many requests ended in which way."""
    num_preemptions: int
    num_promoted_blocks: int
    """Copied back from host memory, on replicas that are attached at the end."""
    num_replayed_states: int
    """Recordings that began in the middle and replayed identically."""
    num_attempts: int
    num_scheduler_starts: int
    virtual_s: float


class World:
    """One run. Create it in its loop."""

    def __init__(self, scenario: Scenario, loop: VirtualLoop, *, keeps_all: bool = False) -> None:
        self.scenario, self._loop = scenario, loop
        self.rng = random.Random(f"world {scenario.seed}")
        self.trace = Trace(loop.time)
        self.trace.keeps_all = keeps_all
        self.network = Network(loop, self.rng, replace(scenario.weather), self.trace)
        self.scheduler = SimulatedScheduler(self.network, scenario.limits, scenario.forgetting)
        self.workers: dict[SimulatedWorker, asyncio.Task[None]] = {}
        self.routers: list[SimulatedRouter] = []
        self.clients: list[Client] = []
        self.is_stormy = True
        self._names = Counter[str]()
        self._crashed_alone = Counter[int]()

    async def run(self) -> Outcome:
        """The whole story. Raises AssertionError (or what else a part raised) when something is not as it must be."""
        self.scheduler.start()
        for _ in range(self.scenario.num_routers):
            self._start_router()
        for _ in range(self.scenario.num_workers):
            self._start_worker()
        arrivals = self._loop.create_task(self._let_requests_arrive())
        misfortunes = self._loop.create_task(self._cause_misfortunes())
        await self._pass_time(self.scenario.storm_s)
        await arrivals
        misfortunes.cancel()
        self._end_storm()
        await self._until_all_ended()
        await self._pass_time(5.0)  # calls that outlive their sequence end as well
        self._check_nothing_is_left()
        self.scheduler.check_recording()
        return self._outcome()

    # Processes.

    def _start_router(self) -> None:
        self._names["router"] += 1
        number = self._names["router"]
        self.routers.append(SimulatedRouter(self.network, self.scheduler, f"router-{number}", 1000 + number))

    def _start_worker(self) -> None:
        self._names["worker"] += 1
        spec = replace(self.scenario.spec, name=f"worker-{self._names['worker']}")
        worker = SimulatedWorker(self.network, self.scheduler, spec, self.scenario.model)
        worker.poison_token_id = POISON_TOKEN_ID
        worker.refusal = self.scenario.refusal if self.is_stormy else 0.0
        worker.longest_step_s = self.rng.choice((0.002, 0.02))
        worker.numeric_errors = {c.wanted.stream_key for c in self.clients if c.wanted.fails_numerically}
        self.trace.note(f"{worker.name} starts")
        self.workers[worker] = self._loop.create_task(self._run_worker(worker))

    async def _run_worker(self, worker: SimulatedWorker) -> None:
        try:
            await worker.run()
        except WorkerDied:
            self._bury(worker)
            self._loop.call_later(0.2, self._start_worker)

    def _bury(self, worker: SimulatedWorker) -> None:
        self.trace.note(f"{worker.name} dies")
        del self.workers[worker]
        if worker.call is not None:
            worker.call.lose_client()

    # What happens.

    async def _let_requests_arrive(self) -> None:
        while not all(router.state.can_serve(MODEL) for router in self.routers):
            await asyncio.sleep(_POLL_S)
        for wanted in self.scenario.requests:
            if self.rng.random() < 0.4:  # the others come in bursts
                await asyncio.sleep(self.rng.random() * 4 * self.scenario.storm_s / len(self.scenario.requests))
            answer = Answer(self.scenario.model, wanted.call.prompt_token_ids, wanted.call.sampling)
            client = Client(wanted, answer)
            client.on_end = functools.partial(self._expect_release, client)
            self.clients.append(client)
            if wanted.fails_numerically:
                for worker in self.workers:
                    worker.numeric_errors.add(wanted.stream_key)
            self.rng.choice(self.routers).open(client, _RECOVERY_TIMEOUT_S)

    async def _cause_misfortunes(self) -> None:
        while self.scenario.misfortunes:
            await asyncio.sleep(self.rng.expovariate(1 / self.scenario.mean_calm_s))
            misfortune = self.rng.choice(self.scenario.misfortunes)
            self.trace.note(misfortune.value)
            await self._cause(misfortune)

    async def _cause(self, misfortune: Misfortune) -> None:
        rng = self.rng
        match misfortune:
            case Misfortune.CALL_BREAKS | Misfortune.WATCH_BREAKS | Misfortune.ATTACH_BREAKS:
                kind = {Misfortune.CALL_BREAKS: "Generate", Misfortune.WATCH_BREAKS: "Watch"}.get(misfortune, "Attach")
                calls = [call for call in self.network.calls if call.name.endswith(kind)]
                if calls:
                    rng.choice(calls).break_off()
            case Misfortune.WORKER_DIES | Misfortune.WORKER_LEAVES:
                if not self.workers:
                    return
                worker = rng.choice(list(self.workers))
                self.workers[worker].cancel()
                self._bury(worker)
                self._loop.call_later(rng.random(), self._start_worker)
            case Misfortune.ROUTER_DIES:
                self.routers.pop(rng.randrange(len(self.routers))).die()
                self._start_router()
            case Misfortune.SCHEDULER_DIES:
                self.scheduler.crash()
                await asyncio.sleep(rng.choice((0.0, 0.01, 1.0)) * rng.random())
                self.scheduler.start()
            case Misfortune.CLIENT_LEAVES:
                live = [client for client in self.clients if client.end is None]
                if live:
                    rng.choice(live).go("the client went away")
            case Misfortune.CACHE_RESET:
                self.scheduler.reset_prefix_cache()
            case Misfortune.DRAIN:
                name = rng.choice(list(self.workers)).name if self.workers else ""
                self.scheduler.drain(name)
                self._loop.call_later(rng.random(), self.scheduler.undrain, name)
            case Misfortune.UPDATE:
                wanted = rng.choice(self.scenario.requests)
                self.scheduler.update(wanted.call.request_id, rng.choice((-2, 0, 5)))

    def _end_storm(self) -> None:
        self.trace.note("the storm is over")
        self.is_stormy = False
        self.network.weather.calm()
        for worker in self.workers:
            worker.refusal = 0.0
        if self.scheduler.core is None:
            self.scheduler.start()

    # What must be true.

    async def _pass_time(self, seconds: float) -> None:
        end = self._loop.time() + seconds
        while self._loop.time() < end:
            await asyncio.sleep(_POLL_S)
            if self._loop.failures:
                raise self._loop.failures[0]

    def _expect_release(self, client: Client) -> None:
        """What a request held must be free soon after its end."""
        bound_s = _COMPLETE_RELEASE_S if isinstance(client.end, Completed) else _RELEASE_S
        self._loop.call_later(bound_s, self._check_released, client.wanted.stream_key, bound_s)

    def _check_released(self, stream_key: int, bound_s: float) -> None:
        sequences = self.scheduler.core.sequences.values() if self.scheduler.core is not None else ()
        live = [sequence for sequence in sequences if sequence.request.stream_key == stream_key]
        assert not live, f"request {stream_key} ended {bound_s} s ago and still is {live[0].state.value} in the core"

    async def _until_all_ended(self) -> None:
        bound = self._loop.time() + _CALM_BOUND_S
        while any(client.end is None for client in self.clients):
            await self._pass_time(_POLL_S)
            if self._loop.time() > bound:
                waiting = [client.wanted.stream_key for client in self.clients if client.end is None]
                raise LiveLock(f"{_CALM_BOUND_S} s after the storm requests {waiting} have not ended")

    def _check_nothing_is_left(self) -> None:
        core = self.scheduler.core
        assert core is not None
        assert not core.sequences, f"sequences {list(core.sequences)} are left in the core"
        statistics = core.statistics()
        assert statistics.num_waiting_tokens == 0, statistics
        assert not any(statistics.num_waiting.values()), statistics
        for replica in statistics.replicas:
            assert replica.num_used_blocks == replica.num_running == replica.num_unanswered_plans == 0, replica
        for router in self.routers:
            assert not router.sinks, f"{router.name} still takes tokens of {list(router.sinks)}"
            assert not router.drivers, f"{router.name} still drives {len(router.drivers)} sequences"
        calls = [call.name for call in self.network.calls if call.name.endswith("Generate")]
        assert not calls, f"calls are left open: {calls}"
        for client in self.clients:
            self._check_end(client)

    def _check_end(self, client: Client) -> None:
        wanted, end, scenario = client.wanted, client.end, self.scenario
        name = f"request {wanted.stream_key}"
        weather = scenario.weather
        may_lose_tokens = weather.token_loss or weather.token_reordering or scenario.refusal
        if isinstance(end, Completed):
            assert not wanted.is_poison, f"{name} is poison and complete: {end}"
            assert not wanted.is_too_long, f"{name} is too long and complete: {end}"
            # The scheduler alone does not say which stop token it was.
            is_named = end.finish is not Finish.STOP_TOKEN or end.final_token_id is not None
            assert is_named or may_lose_tokens, f"{name} does not know its stop token: {end}"
            is_disturbed = may_lose_tokens or set(scenario.misfortunes) - _HARMLESS
            assert is_disturbed or end.receipt.num_attempts == 1, f"{name} took several attempts for nothing: {end}"
            return
        if not isinstance(end, Failed):
            return
        may_crash_alone = {Misfortune.WORKER_DIES, Misfortune.WORKER_LEAVES}
        # A scheduler that starts anew does not know whose process came back; and a request may lose a second worker
        # before the first one is back.
        if Misfortune.SCHEDULER_DIES in scenario.misfortunes or scenario.num_workers > 1:
            may_crash_alone.add(Misfortune.ATTACH_BREAKS)
        excuses = {
            "the prompt is too long": wanted.is_too_long and end.kind is ErrorKind.INVALID_ARGUMENT,
            "its numbers failed": wanted.fails_numerically and "NaN or infinity" in end.message,
            "the queue was full": scenario.may_fill_queue and end.kind is ErrorKind.EXHAUSTED,
            "it is poison": wanted.is_poison and "poison" in end.message,
            "replicas died under it alone": may_crash_alone & set(scenario.misfortunes) and "poison" in end.message,
            "tokens were lost again and again": may_lose_tokens and "brought no new token" in end.message,
        }
        assert any(excuses.values()), f"{name} failed without an excuse: {end}"

    def _outcome(self) -> Outcome:
        ends = Counter(_end_name(client) for client in self.clients)
        receipts = [client.end.receipt for client in self.clients if isinstance(client.end, Completed)]
        return Outcome(
            digest=self.trace.digest(),
            ends=ends,
            num_preemptions=sum(receipt.num_preemptions for receipt in receipts),
            num_promoted_blocks=self._num_promoted_blocks(),
            num_replayed_states=self.scheduler.num_replayed_states,
            num_attempts=sum(receipt.num_attempts for receipt in receipts),
            num_scheduler_starts=self.scheduler.num_starts,
            virtual_s=self._loop.time(),
        )

    def _num_promoted_blocks(self) -> int:
        replicas = self.scheduler.core.statistics().replicas if self.scheduler.core is not None else ()
        return sum(replica.num_promoted_blocks for replica in replicas)


def _end_name(client: Client) -> str:
    if isinstance(client.end, Completed):
        return "completed"
    return client.end.kind.value if isinstance(client.end, Failed) else str(client.end)


class SeedFailed(AssertionError):
    """A seed's world broke a rule; the message says how to see it again."""


def run_seed(seed: int, *, keeps_all: bool = False) -> Outcome:
    """Runs one seed's world to its end. Raises SeedFailed."""
    worlds: list[World] = []

    async def main(loop: VirtualLoop) -> Outcome:
        world = World(draw(seed), loop, keeps_all=keeps_all)
        worlds.append(world)
        return await world.run()

    try:
        return run_virtually(main)
    except Exception as error:
        lines = worlds[0].trace.lines if worlds else []
        shown = lines if keeps_all else lines[-40:]
        story = "\n".join(shown)
        raise SeedFailed(
            f"seed {seed}: {type(error).__name__}: {error}\n"
            f"see it again, with its whole story: python -m tests.simulation {seed}\n{story}"
        ) from error
