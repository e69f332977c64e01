"""What a streamed token costs a router, in CPU time of its process. `--json FILE` writes the figures.

Real router processes serve a made-up model over a scheduler that this process plays: at every step it pushes one token
batch a router with new tokens of every stream, as a replica does. Clients, here too, read the streams over gRPC or
server-sent events. Measured is user and system time of the routers alone, beside a grpc.aio server that does nothing
but write: what gRPC itself costs on the machine at the time.

`--carried` looks for the streams that one router and two carry before a token is under way for longer than a bound.
Every router gets a process of its own that loads it, so two need four cores to show what they can do. `--pause`
measures the longest silence of streams while a prompt of 1.7 million token ids comes in. `--profile FILE` runs one
case with the router in cProfile instead.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.router_load import (
    LOOPBACK,
    Clients,
    Feeder,
    Measured,
    bare_server,
    made_up_scheduler,
    reading,
    router,
    until,
)

NUM_WARM_STEPS = 40
NUM_ROUNDS = 4
"""The one that cost least counts: neighbours on the same core make a program slower, never faster."""
TARGET_US = {"grpc": 60.0, "sse": 90.0}
BARE = "bare grpc.aio"
STEP_MS = 25.0
FAST_STEP_MS = 2.5
"""A router of 32 streams is busy for half of the time then: what a token costs where there is much to do."""

DELAY_BOUND_MS = 50.0
FIRST_STREAMS, MOST_STREAMS = 32, 2048
NUM_PAUSE_STREAMS = 8
NUM_PROMPT_IDS = 1_700_000


@dataclass(frozen=True)
class Case:
    """`num_streams` on each of `num_routers`, `tokens_per_delta` new tokens of each stream at every step."""

    surface: str
    num_streams: int = 32
    num_routers: int = 1
    tokens_per_delta: int = 1
    step_ms: float = STEP_MS

    @property
    def name(self) -> str:
        routers = f", {self.num_routers} routers" if self.num_routers > 1 else ""
        delta = f"{self.tokens_per_delta} tokens a delta"
        return f"{self.surface}, {self.num_streams} streams, {delta}, a step of {self.step_ms:g} ms{routers}"


CASES = [
    Case("grpc"),
    Case(BARE),
    Case("sse"),
    Case("grpc", step_ms=FAST_STEP_MS),
    Case(BARE, step_ms=FAST_STEP_MS),
    Case("sse", step_ms=FAST_STEP_MS),
    Case("grpc", tokens_per_delta=4),
    Case("sse", tokens_per_delta=4),
    Case("grpc", num_routers=2),
    Case("sse", num_routers=2),
]


async def measure(case: Case, num_steps: int, profile: str | None = None) -> dict[str, Any]:
    """Figures of one case: microseconds of CPU per token and per delta, of all servers together."""
    clients = Clients()
    if case.surface == BARE:
        async with (
            bare_server(case.num_streams, case.step_ms) as server,
            reading(BARE, [server], case.num_streams, clients),
        ):
            return await _spend(case, num_steps, None, clients, [server])
    async with _loaded(case, clients, profile) as (feeder, servers):
        return await _spend(case, num_steps, feeder, clients, servers)


@contextlib.asynccontextmanager
async def _loaded(
    case: Case, clients: Clients, profile: str | None = None
) -> AsyncIterator[tuple[Feeder, list[Measured]]]:
    """Routers whose streams are open and read."""
    async with contextlib.AsyncExitStack() as cleanup:
        model, port, feeder = await cleanup.enter_async_context(made_up_scheduler())
        starts = [cleanup.enter_async_context(router(model, port, profile)) for _ in range(case.num_routers)]
        servers = [await start for start in starts]
        await cleanup.enter_async_context(reading(case.surface, servers, case.num_streams, clients))

        async def all_open() -> bool:
            return feeder.num_open == case.num_streams * case.num_routers

        await until(all_open)
        yield feeder, servers


async def _run(case: Case, count: int, feeder: Feeder | None, clients: Clients) -> None:
    """So many steps, until everything is read. A bare server makes its own."""
    loop = asyncio.get_running_loop()
    aim = clients.num_tokens + count * case.num_streams * case.num_routers * case.tokens_per_delta

    async def all_read() -> bool:
        return clients.num_tokens >= aim

    due = loop.time()
    for _ in range(count if feeder is not None else 0):
        assert feeder is not None
        await feeder.step(case.tokens_per_delta)
        due += case.step_ms / 1000
        await asyncio.sleep(max(0.0, due - loop.time()))
    await until(all_read)


async def _spend(
    case: Case, num_steps: int, feeder: Feeder | None, clients: Clients, servers: list[Measured]
) -> dict[str, Any]:
    await _run(case, NUM_WARM_STEPS, feeder, clients)
    rounds: list[list[float]] = []
    tokens_per_delta: list[float] = []
    for _ in range(NUM_ROUNDS):
        before, num_before = [server.cpu_s for server in servers], clients.num_tokens
        deltas_before = clients.num_deltas
        await _run(case, num_steps, feeder, clients)
        # A bare server goes on by itself, so what was read counts, and not what was to be.
        share = len(servers) / (clients.num_tokens - num_before)
        rounds.append([(server.cpu_s - start) * share for server, start in zip(servers, before, strict=True)])
        tokens_per_delta.append((clients.num_tokens - num_before) / (clients.num_deltas - deltas_before))
    best = min(rounds, key=sum)
    joined = tokens_per_delta[rounds.index(best)]
    us_per_token = sum(best) / len(best) * 1e6
    return {
        "case": case.name,
        "us_per_token": round(us_per_token, 1),
        # A router with more to write than is read joins tokens, so a delta may hold more than a step's.
        "tokens_per_delta": round(joined, 2),
        "us_per_delta": round(us_per_token * joined, 1),
        "us_per_token_by_router": [round(one * 1e6, 1) for one in best],
        # What one core for each router would carry.
        "tokens_per_s_of_all_cores": round(len(best) / max(best)),
    }


async def slowest_delay_ms(case: Case, num_steps: int) -> float:
    """The 99th percentile of the time that a token is under way from the worker to the client, of one router."""
    clients = Clients()
    async with _loaded(case, clients) as (feeder, _):
        await _run(case, NUM_WARM_STEPS, feeder, clients)
        clients.feeder = feeder
        await _run(case, num_steps, feeder, clients)
    delays = sorted(clients.delays_s)
    return delays[len(delays) * 99 // 100] * 1e3


async def carried(case: Case, num_steps: int, bound_ms: float) -> int:
    """The most streams of all routers together, to a sixteenth, that keep the bound; each is loaded by a process."""

    async def keeps(num_streams: int) -> bool:
        command = [sys.executable, "-m", "benchmarks.bench_router", "--delay", case.surface, str(num_streams)]
        command += ["--steps", str(num_steps), "--step-ms", str(case.step_ms)]
        starts = [
            asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL)
            for _ in range(case.num_routers)
        ]
        loads = [await start for start in starts]
        said = [(await load.communicate())[0] for load in loads]
        return all(load.returncode == 0 for load in loads) and max(map(float, said)) <= bound_ms

    good, bad = 0, FIRST_STREAMS
    while bad <= MOST_STREAMS and await keeps(bad):
        good, bad = bad, 2 * bad
    while bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if await keeps(middle) else (good, middle)
    return good * case.num_routers


async def longest_pause_ms(case: Case) -> float:
    """The longest time between two tokens of any stream, less a step, while a prompt too long to serve comes in."""
    clients = Clients()
    async with _loaded(case, clients) as (feeder, (server,)):
        await _run(case, NUM_WARM_STEPS, feeder, clients)
        clients.feeder = feeder
        asked = asyncio.create_task(_ask_too_much(server))
        while not asked.done():
            await _run(case, 20, feeder, clients)
        await asked
    return max(clients.delays_s) * 1e3


async def _ask_too_much(server: Measured) -> None:
    """A request with a prompt of NUM_PROMPT_IDS ids; from a process of its own, for making it takes long as well."""
    code = (
        "import json, sys, urllib.request, urllib.error\n"
        "body = json.dumps({'prompt': list(range(1000)) * (int(sys.argv[2]) // 1000), 'max_tokens': 0})\n"
        "try:\n    urllib.request.urlopen(sys.argv[1], body.encode())\n"
        "except urllib.error.HTTPError as error:\n    sys.exit(error.code != 400)\n"
    )
    url = f"http://{LOOPBACK}:{server.http_port}/v1/completions"
    client = await asyncio.create_subprocess_exec(sys.executable, "-c", code, url, str(NUM_PROMPT_IDS))
    if await client.wait():
        raise RuntimeError("the long prompt was not read to its end")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--steps", type=int, default=200, help="steps of each round")
    parser.add_argument("--only", default="", help="run the cases whose name holds this")
    parser.add_argument("--step-ms", type=float, help="time from one step to the next, of all cases")
    parser.add_argument("--carried", action="store_true", help="also look for the streams carried within the bound")
    parser.add_argument("--bound-ms", type=float, default=DELAY_BOUND_MS, help="the bound, of the 99th percentile")
    parser.add_argument("--pause", action="store_true", help="also measure the pause that a long prompt makes")
    parser.add_argument("--profile", help="file for the router's profile; runs the first case alone")
    parser.add_argument("--delay", nargs=2, metavar=("SURFACE", "STREAMS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.delay:
        surface, num_streams = arguments.delay
        case = Case(surface, int(num_streams), step_ms=arguments.step_ms or STEP_MS)
        print(asyncio.run(slowest_delay_ms(case, arguments.steps)))
        return 0
    cases = [replace(case, step_ms=arguments.step_ms or case.step_ms) for case in CASES if arguments.only in case.name]
    if arguments.profile:
        cases = cases[:1]
    figures: dict[str, Any] = {
        "cases": [_show(asyncio.run(measure(case, arguments.steps, arguments.profile))) for case in cases],
        "target_us_per_token": TARGET_US,
        "num_cpus": os.cpu_count(),
    }
    if arguments.carried:
        figures["delay_bound_ms"] = arguments.bound_ms
        figures["streams_carried"] = _carried(arguments)
    if arguments.pause:
        case = Case("sse", NUM_PAUSE_STREAMS, step_ms=arguments.step_ms or STEP_MS)
        figures["longest_pause_ms"] = round(asyncio.run(longest_pause_ms(case)), 1)
        print(f"longest pause while {NUM_PROMPT_IDS} prompt ids come in: {figures['longest_pause_ms']} ms")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2))
    return 0


def _show(figures: dict[str, Any]) -> dict[str, Any]:
    print(
        f"{figures['case']:<64} {figures['us_per_token']:>7.1f} µs/token  {figures['us_per_delta']:>7.1f} µs/delta"
        f"  {figures['tokens_per_delta']:>5} tokens/delta  {figures['tokens_per_s_of_all_cores']:>8} tokens/s",
        flush=True,
    )
    return figures


def _carried(arguments: argparse.Namespace) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for surface in ("grpc", "sse"):
        for num_routers in (1, 2):
            case = Case(surface, num_routers=num_routers, step_ms=arguments.step_ms or STEP_MS)
            streams = asyncio.run(carried(case, arguments.steps, arguments.bound_ms))
            found.setdefault(surface, {})[str(num_routers)] = streams
            print(f"{surface}, {num_routers} router(s): {streams} streams within {arguments.bound_ms:g} ms", flush=True)
    return found


if __name__ == "__main__":
    sys.exit(main())
