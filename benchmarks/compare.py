"""Compares Octavo with vLLM's CPU build and llama.cpp's server, on the same weights, with vLLM's benchmark client.

    python -m benchmarks.compare --peers DIR [--json FILE] [--workloads c1,c8,...] [--only octavo,vllm,llama]

Servers take turns, one at a time, each after the machine has become quiet. Prints Markdown tables; the better of the
peers is 1. benchmarks/README.md says what DIR holds. A peer that isn't there is left out, and the report says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.comparison.client import BenchmarkClient, ClientError
from benchmarks.comparison.contenders import (
    KINDS,
    MODEL_NAME,
    Absent,
    Contender,
    Variants,
    find_contenders,
    weights_directory,
)
from benchmarks.comparison.load import NotQuietError, wait_until_quiet
from benchmarks.comparison.report import Report, Run, markdown, ratios
from benchmarks.comparison.serving import StartError, serving
from benchmarks.comparison.starts import fresh_cache, measure_start
from benchmarks.comparison.workloads import WORKLOADS
from octavo.machine import collect_machine
from octavo.ports import free_port

QUIET_CORES = 0.1
START_TIMEOUT_S = 240.0
WORKLOAD_TIMEOUT_S = 150.0
PROFILE_TIMEOUT_S = 120.0
_STEP_ROWS = ("1", "8", "32", "128")


class Comparison:
    """One run of the whole: takes the turns, and keeps to a time limit that waiting for quiet doesn't count against."""

    def __init__(self, options: argparse.Namespace, client: BenchmarkClient, folder: Path) -> None:
        self._options = options
        self._client = client
        self._folder = folder
        self._begun_s = time.monotonic()
        self._waited_s = 0.0
        self.report = Report(
            date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            machine=machine_facts(),
            scale=options.scale,
            waited_for_quiet=not options.allow_busy,
            workloads=list(options.workloads),
        )

    def run(self) -> None:
        """Every turn. Raises NotQuietError when the machine doesn't become quiet in time."""
        options = self._options
        self._client.start()
        variants = Variants(options.octavo_dtype, options.vllm_dtype, options.vllm_bind, options.llama_type)
        if "octavo" in options.only and not options.no_own_figures:
            self._own_figures()
        for found in find_contenders(options.peers, options.only, variants):
            if isinstance(found, Absent):
                self.report.absent[found.name] = found.reason
                progress(f"{found.name}: left out, {found.reason}")
            else:
                self._turn(found)
        self.report.seconds = self._spent_s()

    def _turn(self, contender: Contender) -> None:
        """One server: start, every workload, stop."""
        run = Run(contender.name, contender.kind, contender.version, contender.settings(self._options.peers))
        self.report.runs.append(run)
        self._quiet(contender.name)
        log = self._folder / f"{contender.name.replace(' ', '-')}.log"
        command = (*contender.command, contender.port_option, str(free_port()))
        limit_s = min(START_TIMEOUT_S, self._left_s())
        try:
            with serving(command, contender.environment, MODEL_NAME, log, limit_s) as server:
                run.first_token_s = server.first_token_s
                progress(f"{contender.name}: first token after {server.first_token_s:.1f} s")
                for name in self.report.workloads:
                    self._workload(run, server.base_url, name)
        except StartError as error:
            run.failures["start"] = str(error)
            progress(f"{contender.name}: {error}")

    def _workload(self, run: Run, base_url: str, name: str) -> None:
        limit_s = min(WORKLOAD_TIMEOUT_S, self._left_s())
        if limit_s <= 0:
            run.failures[name] = "not run, --time-limit was reached"
            return
        try:
            found = self._client.run(base_url, WORKLOADS[name], self._options.scale, limit_s)
        except ClientError as error:
            run.failures[name] = str(error)
            progress(f"{run.name}, {name}: {error}")
            return
        run.measurements[name] = found
        progress(
            f"{run.name}, {name}: {found.output_tokens_per_s:.1f} tok/s, TTFT {found.mean_ttft_ms:.0f} ms, "
            f"TPOT {found.mean_tpot_ms:.1f} ms, others {found.others_cores:.2f} cores"
        )

    def _own_figures(self) -> None:
        """Octavo's start on the default model, and its worker's step times."""
        self._quiet("octavo's step times")
        dtype = self._options.octavo_dtype[0]
        self.report.step_profile = step_profile(weights_directory(self._options.peers), dtype, self._folder)
        progress("step times done")
        # The second start finds in its own cache what the first one, cold, converted.
        cache = fresh_cache(self._folder)
        for what in ("cold", "cached"):
            self._quiet(f"octavo's start, {what}")
            try:
                log = self._folder / f"start-{what}.log"
                self.report.start_s[what] = measure_start(cache, log, START_TIMEOUT_S).first_token_s
            except StartError as error:
                self.report.start_s[what] = str(error)
            progress(f"octavo's start, {what}: {self.report.start_s[what]}")

    def _quiet(self, before: str) -> None:
        if self._options.allow_busy:
            return
        begun = time.monotonic()
        progress(f"waiting for a quiet machine before {before}")
        wait_until_quiet(QUIET_CORES, self._options.quiet_wait)
        self._waited_s += time.monotonic() - begun

    def _spent_s(self) -> float:
        return time.monotonic() - self._begun_s - self._waited_s

    def _left_s(self) -> float:
        return float(self._options.time_limit) - self._spent_s()


def step_profile(model: Path, dtype: str, folder: Path) -> dict[str, Any] | str:
    """What benchmarks/step_profile.py measures in a process of its own, or why it did not."""
    target = folder / "steps.json"
    command = [sys.executable, "-m", "benchmarks.step_profile", "--model", str(model), "--dtype", dtype]
    command += ["--rows", *_STEP_ROWS, "--steps", "30", "--json", str(target)]
    root = Path(__file__).parents[1]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PROFILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"not done within {PROFILE_TIMEOUT_S:.0f} s"
    if done.returncode != 0:
        return f"failed: {' | '.join(done.stderr.strip().splitlines()[-2:])}"
    found: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return {**found, "dtype": dtype}


def machine_facts() -> dict[str, Any]:
    """The machine and what Octavo computes with."""
    facts = collect_machine()
    names = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return {
        "cpu": next((line.partition(":")[2].strip() for line in names if line.startswith("model name")), "unknown CPU"),
        "num_cpus": facts.num_cpus,
        "memory_gib": round(facts.total_memory_bytes / 2**30, 1),
        "system": f"{facts.system} {platform.release()}",
        "vector_flags": vector_flags(facts.cpu_flags),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def vector_flags(flags: frozenset[str]) -> list[str]:
    """Instruction sets that decide how fast a model runs here."""
    return sorted(flag for flag in flags if flag.startswith(("avx", "amx", "fma", "f16c", "asimd", "sve", "bf16")))


def has_bfloat16(flags: frozenset[str]) -> bool:
    """Whether the CPU multiplies bfloat16 itself."""
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"})


def progress(text: str) -> None:
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    native = has_bfloat16(collect_machine().cpu_flags)
    dtype = "bfloat16" if native else "float32"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, help="directory that holds the peers and the weights")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--workloads", type=_choice(tuple(WORKLOADS)), default=tuple(WORKLOADS))
    parser.add_argument("--only", type=_choice(KINDS), default=KINDS, help="servers to run (default: all)")
    parser.add_argument("--octavo-dtype", type=_words, default=(dtype,), help=f"several by commas (default: {dtype})")
    parser.add_argument("--vllm-dtype", type=_words, default=(dtype,), help=f"several by commas (default: {dtype})")
    parser.add_argument("--vllm-bind", type=_words, default=("auto",), help="values of VLLM_CPU_OMP_THREADS_BIND")
    llama = "bf16" if native else "f16"
    parser.add_argument("--llama-type", type=_words, default=(llama,), help=f"types of GGUF weights (default: {llama})")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the requests, for a trial (default: 1)")
    parser.add_argument("--allow-busy", action="store_true", help="a trial: don't wait until the machine is quiet")
    parser.add_argument("--quiet-wait", type=float, default=600.0, help="longest wait for quiet, s (default: 600)")
    parser.add_argument("--time-limit", type=float, default=720.0, help="for all turns together, s (default: 720)")
    parser.add_argument("--logs", type=Path, help="keep the servers' and the client's logs in this directory")
    parser.add_argument("--no-own-figures", action="store_true", help="leave out Octavo's start and step times")
    return parser.parse_args(arguments)


def _words(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _choice(allowed: tuple[str, ...]) -> Any:
    def read(text: str) -> tuple[str, ...]:
        asked = _words(text)
        if unknown := set(asked) - set(allowed):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(allowed)}")
        return tuple(each for each in allowed if each in asked)

    return read


def _write(report: Report, target: Path | None) -> None:
    print(markdown(report))
    if target is not None:
        found = {**asdict(report), "ratios": ratios(report)}
        target.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    options = parse()
    python = options.peers / "vllm/bin/python"
    if not python.exists():
        sys.exit(f"{python} is not there; vLLM's benchmark client drives every server: see benchmarks/README.md")
    with tempfile.TemporaryDirectory(prefix="octavo-compare-") as name:
        folder = Path(name) if options.logs is None else options.logs.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with BenchmarkClient(python, weights_directory(options.peers), folder) as client:
            comparison = Comparison(options, client, folder)
            try:
                comparison.run()
            except (NotQuietError, ClientError) as error:
                _write(comparison.report, options.json)
                sys.exit(str(error))
        _write(comparison.report, options.json)


if __name__ == "__main__":
    main()
