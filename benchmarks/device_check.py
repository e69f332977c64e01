"""Checks and measures the GPU at hand in at most five minutes, and writes what it found as JSON.

    python -m benchmarks.device_check [--json FILE] [--seconds 270] [--part kernels|attention|sampling|model ...]
    python -m benchmarks.device_check --dry     # no GPU: compiles every kernel, runs the program itself at toy sizes

Each kernel against the reference; the two ceilings, copy bandwidth and bf16 matrix products; sampling; decode and
prefill attention beside torch's SDPA and FlashInfer where it is installed; and an 8B-shaped model with random weights
through the worker's own classes; beside each the aim for an H200. Parts that the time does not allow are named in the
output. The file is written after every part. Exit status 1 when a kernel is wrong or a part failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.gpu import aims
from benchmarks.gpu.attention import decode_table, prefill_table
from benchmarks.gpu.bench import FULL, TOY, Bench
from benchmarks.gpu.kernel_cases import cases, compare
from benchmarks.gpu.model_steps import step_table
from benchmarks.gpu.sampling import sampling_table
from kernels.reference import ReferenceBackend

PARTS = ("kernels", "attention", "sampling", "model")


def check_kernels(bench: Bench, has_fp8: bool) -> bool:
    """Whether all are right; a kernel that cannot run is wrong."""
    are_right = True
    for case in cases(has_fp8):
        if not bench.has_time(5.0, f"kernels: {case.name}"):
            return are_right
        try:
            verdict = compare(case, bench.backend, bench.place, ReferenceBackend())
        except Exception as error:  # it is wrong, and the others are still to be looked at
            bench.note("kernel", f"WRONG  {case.name}: {_words(error)}", name=case.name, error=None, is_right=False)
            are_right = False
            continue
        are_right &= verdict.is_right
        state = "right" if verdict.is_right else "WRONG"
        line = f"{state:<6} {case.name:<36} error {verdict.error:.1e}, at most {verdict.tolerance:g}"
        bench.note("kernel", line, name=case.name, error=verdict.error, is_right=verdict.is_right)
    return are_right


def ceilings(bench: Bench) -> tuple[float, float]:
    """(bytes a second that a copy reads and writes, FLOP a second of a square bf16 product), measured."""
    edge = bench.sizes.matrix
    copy_rate = _copy_rate(bench)
    left, right = (torch.randn(edge, edge, device=bench.place).bfloat16() for _ in range(2))
    flops = 2 * edge**3 / (bench.time_us([lambda: left @ right]) / 1e6)
    aim = f"  [{aims.CARD}: {aims.COPY_BYTES_PER_S / 1e9:.0f}, {aims.MATMUL_FLOPS_PER_S / 1e12:.0f}]"
    line = f"ceilings: copy {copy_rate / 1e9:.0f} GB/s, bf16 products {flops / 1e12:.1f} TFLOP/s{aim}"
    bench.note("ceilings", line, copy_bytes_per_s=copy_rate, matmul_flops_per_s=flops)
    return copy_rate, flops


def _copy_rate(bench: Bench) -> float:
    source = torch.zeros(bench.sizes.copy_bytes, dtype=torch.uint8, device=bench.place)
    target = torch.empty_like(source)
    return 2 * source.numel() / (bench.time_us([lambda: target.copy_(source)]) / 1e6)


def measure(bench: Bench, parts: Sequence[str], has_fp8: bool, save: Callable[[], None] = lambda: None) -> bool:
    """Everything that was asked for; whether all kernels are right and no part failed. `save` is called after each."""
    is_well = check_kernels(bench, has_fp8) if "kernels" in parts else True
    save()
    copy_rate, flops = ceilings(bench)
    tables: dict[str, list[Callable[[], None]]] = {
        # Before the tables, which can be cut short anywhere.
        "model": [lambda: step_table(bench, copy_rate, has_fp8)],
        "sampling": [lambda: sampling_table(bench)],
        "attention": [lambda: decode_table(bench, copy_rate, has_fp8), lambda: prefill_table(bench, flops)],
    }
    for part, calls in tables.items():
        for call in calls if part in parts else ():
            try:
                call()
            except Exception as error:  # out of memory in one table is no reason to lose the others
                bench.note("failed", f"FAILED {part}: {_words(error)}", part=part, error=_words(error))
                is_well = False
            save()
    return is_well


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


def gpu_bench(seconds: float) -> tuple[Bench, bool]:
    """On the first visible GPU, and whether it has fp8."""
    from kernels.triton import TritonBackend
    from worker_svc.device.cuda import CudaDevice

    place = torch.device("cuda", 0)
    device = CudaDevice(place)
    has_fp8 = torch.cuda.get_device_capability(place) >= (8, 9)
    kernels = TritonBackend(place), TritonBackend(place, batch_invariant=True)
    return Bench(device, *kernels, FULL, time.monotonic() + seconds, _say), has_fp8


def toy_bench(seconds: float) -> Bench:
    """The whole program on the CPU: fakes run ahead and replay, the reference computes."""
    from tests.fakes.eager_device import EagerDevice, PaddedReference

    torch.manual_seed(0)
    return Bench(EagerDevice(), PaddedReference(), PaddedReference(), TOY, time.monotonic() + seconds, _say)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--seconds", type=float, default=270.0, help="time that it may take")
    parser.add_argument("--part", action="append", choices=PARTS, help="leave the others out; may be given again")
    parser.add_argument("--dry", action="store_true", help="no GPU: compile everything, run at toy sizes on the CPU")
    options = parser.parse_args(words)
    begun = time.monotonic()
    if options.dry:
        from benchmarks.gpu.compiling import compile_all

        figures = compile_all(_say)
        bench, has_fp8 = toy_bench(options.seconds), True
        bench.figures += figures
        bench.say("toy sizes on the CPU: these figures say that the program runs, and nothing else")
    elif not torch.cuda.is_available():
        print("no CUDA device is visible (octavo doctor says why); --dry needs none", file=sys.stderr)
        return 2
    else:
        bench, has_fp8 = gpu_bench(options.seconds)
    save = partial(_save, bench, options.json, options.dry, begun)
    try:
        is_well = measure(bench, options.part or PARTS, has_fp8, save)
    finally:
        save()
    says = "all kernels are right" if is_well else "A KERNEL IS WRONG OR A PART FAILED"
    bench.say(f"{says}, {time.monotonic() - begun:.0f} s")
    return 0 if is_well else 1


def _save(bench: Bench, path: Path | None, is_dry: bool, begun_s: float) -> None:
    """What was found so far, so that a run that is ended leaves it."""
    if path is not None:
        result = {**_machine(is_dry), "seconds": time.monotonic() - begun_s, "figures": bench.figures}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _machine(is_dry: bool) -> dict[str, object]:
    """What the figures are of; a dry run has none of a GPU."""
    card = None if is_dry else torch.cuda.get_device_name(0)
    date = time.strftime("%Y-%m-%d")
    return {"card": card, "date": date, "torch": torch.__version__, "cuda": torch.version.cuda, "is_dry": is_dry}


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
