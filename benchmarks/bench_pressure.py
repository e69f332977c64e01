"""What a scarce KV cache costs on the real CPU stack, and what a cached prefix saves. `--json FILE` writes figures.

    KV pressure       twenty clients (128 in, 128 out) with KV for ten, against ten with ample KV: tokens per second,
                      the same text, and the line of advice in the log
    cached prefixes   mean time to the first token with 128, 512 and 1,024 tokens cached before 64 others, against the
                      part of the prompt that is cached
    ways to preempt   long answers that better work keeps displacing: swap, recompute and auto, on a worker's runner

The first two run `octavo serve` and its gRPC client, the third runs core and runner in this process. Run it on a quiet
machine; `--scale 0.1` is a trial.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from benchmarks.comparison.serving import serving
from benchmarks.core_on_runner import CoreOnRunner
from benchmarks.second_copies import make_all_copies
from kernels.select import open_backend
from octavo import Client
from octavo.internal.v1 import types_pb2
from octavo.machine import collect_machine, usable_cpus
from octavo.ports import free_ports
from octavo.precision import resolve_dtype
from octavo.sources import resolve
from scheduler_svc.core.limits import CoreLimits, PreemptionMode
from scheduler_svc.core.statistics import ReplicaStatistics
from tests.worker.harness import RunnerShape, build_runner
from worker_svc.device.workplace import spare_memory_bytes

Figures = dict[str, object]
BLOCK_SIZE = 16
NUM_IN, NUM_OUT = 128, 128
TEN_CLIENTS = 10
AMPLE_BLOCKS = 1024
START_TIMEOUT_S = 120.0
# After its first requests a worker reads its vocabulary for grammars, beside whatever comes.
SETTLE_S = 3.0
_NAME = "measured"


@dataclass(frozen=True)
class Stack:
    """A running `octavo serve`."""

    client: Client
    log: Path


@contextmanager
def stack(model: str, folder: Path, name: str, *options: str) -> Iterator[Stack]:
    """`octavo serve` until the block ends."""
    (grpc_port, http_port), log = free_ports(2), folder / f"{name}.log"
    command = (sys.executable, "-m", "octavo", "serve", model, "--served-model-name", _NAME, "--log-level", "info")
    ports = ("--grpc-port", str(grpc_port), "--http-port", str(http_port))
    server = serving((*command, *options, *ports), {}, _NAME, log, START_TIMEOUT_S)
    with server, Client(f"127.0.0.1:{grpc_port}") as client:
        yield Stack(client, log)


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    """Random token ids; no two seeds have a block in common."""
    random = Random(seed)
    return [random.randrange(1000, 40_000) for _ in range(num_tokens)]


# KV pressure ----------------------------------------------------------------------------------------------------------


def closed_loop(client: Client, num_clients: int, num_requests: int, num_out: int) -> tuple[float, list[str], int]:
    """Output tokens per second of clients that each send one request after the other; the texts; preemptions."""

    def ask(number: int) -> tuple[str, int]:
        result = client.generate(prompt_of(number, NUM_IN), max_tokens=num_out, ignore_eos=True, temperature=0)
        return result.text, result.choices[0].receipt.preemptions

    begun = time.monotonic()
    with ThreadPoolExecutor(num_clients) as pool:
        answers = list(pool.map(ask, range(num_requests)))
    seconds = time.monotonic() - begun
    return num_requests * num_out / seconds, [text for text, _ in answers], sum(num for _, num in answers)


def served(options: argparse.Namespace, folder: Path) -> Figures:
    """What is asked of stacks. Both sides of the pressure run the same requests."""
    num_requests = max(20, round(60 * options.scale) // 20 * 20)
    num_out = NUM_OUT if options.scale >= 0.5 else NUM_OUT // 4
    num_blocks = TEN_CLIENTS * -(-(NUM_IN + num_out) // BLOCK_SIZE)
    with stack(options.model, folder, "ample", "--num-kv-blocks", str(AMPLE_BLOCKS)) as ample:
        ample.client.generate(prompt_of(-1, NUM_IN), max_tokens=2)
        time.sleep(SETTLE_S)
        savings = cached_prefixes(ample.client, options.scale)
        ample.client.generate(prompt_of(-1, NUM_IN), max_tokens=2)
        rate_of_ten, expected, _ = closed_loop(ample.client, TEN_CLIENTS, num_requests, num_out)
    with stack(options.model, folder, "scarce", "--num-kv-blocks", str(num_blocks)) as scarce:
        scarce.client.generate(prompt_of(-1, NUM_IN), max_tokens=2)
        rate_of_twenty, texts, num_preemptions = closed_loop(scarce.client, 2 * TEN_CLIENTS, num_requests, num_out)
        time.sleep(2)  # advice is given once a second
        advice = [
            line
            for line in scarce.log.read_text(errors="replace").splitlines()
            if "KV blocks" in line and "too few" in line
        ]
    pressure: Figures = {
        "ten clients, ample KV, tokens/s": round(rate_of_ten, 1),
        f"twenty clients, {num_blocks} blocks, tokens/s": round(rate_of_twenty, 1),
        "ratio": round(rate_of_twenty / rate_of_ten, 3),
        "identical text": texts == expected,
        "preemptions": num_preemptions,
        "advice": advice[-1:],
        "requests": num_requests,
    }
    return {"KV pressure": pressure, "cached prefixes": savings}


# Cached prefixes ------------------------------------------------------------------------------------------------------


def first_token_ms(client: Client, prompt: list[int]) -> float:
    """Milliseconds until the first token comes."""
    begun = time.perf_counter()
    for _ in client.generate(prompt, max_tokens=1, ignore_eos=True, temperature=0, stream=True):
        break
    return (time.perf_counter() - begun) * 1e3


def cached_prefixes(client: Client, scale: float) -> Figures:
    """One request at a time; cached and uncached ones take turns, so that the machine's moods hit both.

    Single requests differ by a fifth, so of the short ones there are more, in about the same time.
    """
    figures: Figures = {}
    for num_shared in (128, 512, 1024):
        num_repeats = max(2, round(8 * scale * (1024 + 64) / (num_shared + 64)))
        shared = prompt_of(10_000 + num_shared, num_shared)
        first_token_ms(client, [*shared, *prompt_of(1, 64)])
        cached, uncached = [], []
        for repeat in range(num_repeats):
            seed = 20_000 + num_shared * 100 + repeat
            cached.append(first_token_ms(client, [*shared, *prompt_of(seed, 64)]))
            uncached.append(first_token_ms(client, prompt_of(seed + 50, num_shared + 64)))
        saved, ideal = 1 - statistics.mean(cached) / statistics.mean(uncached), num_shared / (num_shared + 64)
        figures[f"{num_shared}+64"] = {
            "uncached, ms": round(statistics.mean(uncached), 1),
            "cached, ms": round(statistics.mean(cached), 1),
            "saved": round(saved, 4),
            "of the ideal": round(saved / ideal, 4),
            "requests of each kind": num_repeats,
        }
    return figures


# Ways to preempt ------------------------------------------------------------------------------------------------------

LONG_IN, LONG_OUT, NUM_LONG = 256, 96, 6
BURST_IN, BURST_OUT, NUM_BURST = 192, 8, 4
STEPS_BETWEEN_BURSTS = 20
NUM_TURNS = 6


def displaced_ms(pair: CoreOnRunner, scale: float) -> float:
    """Time of all steps until long answers, every now and then displaced by a burst of better work, are complete."""
    num_out = max(24, round(LONG_OUT * scale))
    for key in range(NUM_LONG):
        pair.submit(key, prompt_of(key, LONG_IN), _greedy(num_out), priority=1)
    next_key, num_steps = 1000, 0
    while any(not pair.stories[key].is_over for key in range(NUM_LONG)):
        pair.step()
        num_steps += 1
        if num_steps % STEPS_BETWEEN_BURSTS == 0:
            for _ in range(NUM_BURST):
                pair.submit(next_key, prompt_of(next_key, BURST_IN), _greedy(BURST_OUT))
                next_key += 1
    pair.run()
    return pair.busy_ns / 1e6


def ways_to_preempt(options: argparse.Namespace) -> Figures:
    """Each mode in turn, some rounds, and the median of each: single turns of the same work differ by a tenth.

    Beside the rates stands what each mode did, and by which costs auto chose: a difference in rate without one in these
    is the machine's.
    """
    num_blocks = NUM_LONG * -(-(LONG_IN + LONG_OUT) // BLOCK_SIZE)
    source = resolve(options.model)
    stored = None if source.is_gguf else json.loads((source.directory / "config.json").read_text()).get("torch_dtype")
    dtype = getattr(torch, resolve_dtype("auto", stored, collect_machine().cpu_flags))
    shape = RunnerShape(16, num_blocks, BLOCK_SIZE, 512, 512, num_host_blocks=4 * num_blocks)
    backend = open_backend("auto", usable_cpus(), spare_bytes=spare_memory_bytes())
    runner = build_runner(source, shape, dtype, backend)
    make_all_copies(backend)
    rates: dict[str, list[float]] = {mode.value: [] for mode in PreemptionMode}
    done: dict[str, dict[str, object]] = {}
    modes = deque(PreemptionMode)
    for _ in range(max(1, math.ceil(NUM_TURNS * options.scale))):
        modes.rotate()  # so that none always follows the same other
        for mode in modes:
            pair = CoreOnRunner(runner, CoreLimits(preemption_mode=mode), shape.num_host_blocks)
            took_ms = displaced_ms(pair, options.scale)
            rates[mode.value].append(sum(len(story.token_ids) for story in pair.stories.values()) / took_ms * 1e3)
            done[mode.value] = _what_was_done(pair.statistics)
    usual = {mode: statistics.median(found) for mode, found in rates.items()}
    return {
        "tokens/s": {mode: [round(rate, 2) for rate in found] for mode, found in rates.items()},
        "auto : best": round(usual["auto"] / max(usual["swap"], usual["recompute"]), 3),
        "what was done": done,
    }


def _what_was_done(replica: ReplicaStatistics) -> dict[str, object]:
    return {
        "preemptions": dict(replica.num_preemptions_by_kind),
        "blocks to host": replica.num_demoted_blocks,
        "blocks back": replica.num_promoted_blocks,
        "tokens computed again": replica.num_recomputed_tokens,
        "ms to compute a block": None if replica.token_ns is None else round(BLOCK_SIZE * replica.token_ns / 1e6, 3),
        "ms to copy a block": None if replica.copy_ns is None else round(replica.copy_ns / 1e6, 3),
    }


def _greedy(num_out: int) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(top_p=1.0, repetition_penalty=1.0, max_tokens=num_out)


# ----------------------------------------------------------------------------------------------------------------------


def main() -> None:
    """Runs the sections asked for and prints them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--model", default="default", help="name or directory, as `octavo serve` takes it")
    parser.add_argument("--scale", type=float, default=1.0, help="part of the requests and repeats to run")
    parser.add_argument("--only", default="", help="run the sections whose name contains this")
    options = parser.parse_args()
    sections: dict[str, Callable[[Path], Figures]] = {
        "KV pressure, cached prefixes": lambda folder: served(options, folder),
        "ways to preempt": lambda folder: {"ways to preempt": ways_to_preempt(options)},
    }
    figures: Figures = {}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for name, section in sections.items():
            if options.only in name:
                found = section(Path(folder))
                figures |= found
                print(json.dumps(found, indent=1), flush=True)
    figures["seconds"] = round(time.monotonic() - begun, 1)
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
