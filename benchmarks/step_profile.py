"""Where the time of one decode step goes in a worker, without router, client or scheduler.

Runs the runner alone on a model and feeds it serialized plans as a scheduler would send them; all sequences decode, one
token a step. Prints the median microseconds of each phase at each row count; `--json FILE` writes them. Kernel phases
are timed at the backend's boundary, so `decoder` and `rows, sampling` are what Python spends between kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.second_copies import make_all_copies
from kernels.api import Backend, LayerFusion
from kernels.select import open_backend
from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.machine import usable_cpus
from octavo.sources import resolve
from tests.worker.harness import RunnerShape, build_runner
from worker_svc.device.workplace import spare_memory_bytes
from worker_svc.messages import step_result, token_batches
from worker_svc.runner import Runner

BLOCK_SIZE = 16
# Timed calls of the backend, by the phase that they belong to.
KERNELS = {
    "plan_attention": "plan attention",
    "linear": "matrix products",
    "rope_write_kv": "rope, write KV",
    "attention": "attention",
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "silu_mul": "silu mul",
    "sample": "sample",
}


@dataclass(frozen=True)
class Figure:
    """Medians over the steps of one row count, in microseconds."""

    num_rows: int
    context: int
    num_threads: int
    phases: dict[str, float]
    step: float


class Stopwatch:
    """Adds up nanoseconds by phase until they are taken."""

    def __init__(self) -> None:
        self._spent_ns: defaultdict[str, int] = defaultdict(int)

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun = time.perf_counter_ns()
            try:
                return function(*args)
            finally:
                self._spent_ns[phase] += time.perf_counter_ns() - begun

        return call

    def take(self) -> dict[str, int]:
        spent, self._spent_ns = dict(self._spent_ns), defaultdict(int)
        return spent


class TimedBackend:
    """A backend whose calls are timed; `fuses` leaves it its fused layers, which are then timed as a whole."""

    def __init__(self, inner: Backend, watch: Stopwatch, fuses: bool) -> None:
        self._inner = inner
        self._watch = watch
        self._fuses = fuses
        for name, phase in KERNELS.items():
            setattr(self, name, watch.timed(phase, getattr(inner, name)))

    def fuse_layers(self, *args: Any) -> Any:
        """None where each kernel is to be seen."""
        if not self._fuses or not isinstance(self._inner, LayerFusion):
            return None
        fused = self._inner.fuse_layers(*args)
        return None if fused is None else self._watch.timed("layers", fused)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Plans:
    """Serialized plans of `num_rows` sequences that decode together: prompts admitted, then one token a step."""

    def __init__(self, num_rows: int, context: int, num_steps: int, max_step_tokens: int, temperature: float) -> None:
        blocks_each = -(-(context + num_steps) // BLOCK_SIZE)
        self.prefills: list[bytes] = []
        sampling = types_pb2.SamplingParams(
            top_p=1, repetition_penalty=1, max_tokens=num_steps + 1, temperature=temperature
        )
        rows_each = max(1, max_step_tokens // context)
        for first in range(0, num_rows, rows_each):
            slots = range(first, min(first + rows_each, num_rows))
            admissions = [
                worker_pb2.Admission(
                    slot=slot,
                    token_ids=[100 + (7 * slot + 13 * i) % 1000 for i in range(context)],
                    num_prompt_tokens=context,
                    block_ids=range(slot * blocks_each, (slot + 1) * blocks_each),
                    sampling=sampling,
                    router_id=1,
                    stream_key=slot + 1,
                    attempt=1,
                )
                for slot in slots
            ]
            self.prefills.append(self._plan(slots, 0, context, admissions))
        self.decodes = [self._plan(range(num_rows), context + i, 1, []) for i in range(num_steps - 1)]

    def _plan(self, slots: range, start: int, count: int, admissions: list[worker_pb2.Admission]) -> bytes:
        num_rows = len(slots)
        plan = worker_pb2.StepPlan(admissions=admissions, row_slots=slots)
        plan.row_starts.extend([start] * num_rows)
        plan.row_counts.extend([count] * num_rows)
        return plan.SerializeToString()


def profile(runner: Runner, watch: Stopwatch, num_rows: int, options: argparse.Namespace) -> Figure:
    """One row count: prefill, a few steps to warm up, then the timed ones."""
    runner.reset()
    plans = Plans(num_rows, options.context, options.steps, runner.limits.max_step_tokens, options.temperature)
    spent: list[dict[str, int]] = []
    for step, data in enumerate((*plans.prefills, *plans.decodes), start=1):
        begun = time.perf_counter_ns()
        plan = worker_pb2.StepPlan.FromString(data)
        plan.step = step
        parsed = time.perf_counter_ns()
        watch.take()
        outcome = runner.run(plan)
        ran = time.perf_counter_ns()
        inside = watch.take()
        for batches in token_batches(outcome).values():
            for batch in batches:
                batch.message.SerializeToString()
        step_result(outcome, 1, (), 1).SerializeToString()
        ended = time.perf_counter_ns()
        decoder = inside.pop("forward") + inside.pop("logits")
        of_decoder = sum(ns for phase, ns in inside.items() if phase not in ("sample", "plan attention"))
        spent.append(
            {
                "parse plan": parsed - begun,
                **inside,
                "decoder": decoder - of_decoder,
                "rows, sampling": ran - parsed - decoder - inside["sample"] - inside["plan attention"],
                "messages": ended - ran,
                "step": ended - begun,
            }
        )
    measured = spent[len(plans.prefills) + 3 :]
    medians = {phase: statistics.median(each[phase] for each in measured) / 1000 for phase in measured[0]}
    return Figure(num_rows, options.context, torch.get_num_threads(), medians, medians.pop("step"))


def table(figures: list[Figure]) -> str:
    """A column a row count, a line a phase, microseconds."""
    names = list(figures[0].phases)
    lines = [f"{'rows':<18}" + "".join(f"{figure.num_rows:>10}" for figure in figures)]
    lines += [f"{name:<18}" + "".join(f"{figure.phases[name]:>10.0f}" for figure in figures) for name in names]
    lines.append(f"{'step':<18}" + "".join(f"{figure.step:>10.0f}" for figure in figures))
    return "\n".join(lines)


def build(options: argparse.Namespace) -> tuple[Runner, Stopwatch, Backend]:
    """A runner over the model whose kernels and decoder are timed."""
    watch = Stopwatch()
    backend = open_backend(options.kernels, options.num_threads or usable_cpus(), spare_bytes=spare_memory_bytes())
    num_slots = max(options.rows)
    max_model_len = options.context + options.steps + BLOCK_SIZE
    shape = RunnerShape(
        num_slots=num_slots,
        num_blocks=num_slots * -(-max_model_len // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        max_model_len=max_model_len,
        max_step_tokens=max(512, options.context, num_slots),
    )
    timed = cast(Backend, TimedBackend(backend, watch, not options.by_kernel))
    runner = build_runner(resolve(options.model), shape, getattr(torch, options.dtype), timed)
    make_all_copies(backend)
    decoder: Any = runner._model._model.decoder
    decoder.forward = watch.timed("forward", decoder.forward)
    decoder.logits = watch.timed("logits", decoder.logits)
    return runner, watch, backend


@contextlib.contextmanager
def beside(loads: list[str]) -> Iterator[None]:
    """Runs a process for each load meanwhile, "BUSY:IDLE" microseconds by turns, as a client or a router would."""
    program = (
        "import sys, time\n"
        "busy_s, idle_s = (float(us) / 1e6 for us in sys.argv[1].split(':'))\n"
        "while True:\n"
        "    end_s = time.perf_counter() + busy_s\n"
        "    while time.perf_counter() < end_s: pass\n"
        "    if idle_s: time.sleep(idle_s)\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, load]) for load in loads]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--steps", type=int, default=40, help="decode steps at each row count")
    parser.add_argument("--context", type=int, default=128, help="prompt tokens of each sequence")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--kernels", default="auto", choices=("auto", "reference", "cpu"))
    parser.add_argument("--num-threads", type=int)
    parser.add_argument("--by-kernel", action="store_true", help="a call for each kernel, to see each, at its cost")
    parser.add_argument(
        "--beside",
        nargs="+",
        default=[],
        metavar="BUSY:IDLE",
        help="processes that take a core meanwhile, microseconds",
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    runner, watch, backend = build(options)
    with beside(options.beside):
        figures = [profile(runner, watch, num_rows, options) for num_rows in options.rows]
    info = backend.info
    print(f"{info.name} {info.variant}, {options.dtype}, context {options.context}, medians in microseconds")
    print(table(figures))
    if options.json:
        facts = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__}
        report = {
            **facts,
            "beside": options.beside,
            "kernels": f"{info.name} {info.variant}",
            "figures": [asdict(each) for each in figures],
        }
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
