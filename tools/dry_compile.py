"""Compiles Triton kernels for GPUs that are not there, through the launches of the very code that runs on them.

    with dry_run(90) as compiled:
        backend.attention(...)            # CPU tensors; every launch compiles its kernel and runs nothing
    report = Report(compiled[0])          # registers, stack, shared memory, instructions

Knows compilers and machine code; knows none of our kernels. Not for a process with TRITON_INTERPRET=1: there the
language's own functions are interpreted ones. Needs Triton with its NVIDIA tools alone.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import compiler

TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"
# Shared memory that one program may take, in bytes, by compute capability.
SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}


def missing_tools() -> list[str]:
    """Which of the programs needed did not come with this Triton."""
    return [name for name in ("ptxas", "cuobjdump", "nvdisasm") if not (TOOLS / name).exists()]


@contextlib.contextmanager
def dry_run(capability: int, is_fresh: bool = False) -> Iterator[list[Any]]:
    """Launches inside compile for `capability`; yields the list of the compiled kernels, in the order of first launch.
    What earlier runs compiled is not compiled again, unless `is_fresh`.

    Raises triton.runtime.errors.OutOfResources for a kernel that needs more shared memory than the device has.
    """
    compiled: list[Any] = []
    driver = _DryDriver(capability, next(_fresh_devices) if is_fresh else capability)
    initialise = compiler.CompiledKernel._init_handles

    def init_handles(kernel: Any) -> None:
        if kernel.module is None:
            compiled.append(kernel)
        initialise(kernel)

    clear = getattr(compiler.max_shared_mem, "cache_clear", None)
    if clear is not None:
        clear()
    triton.runtime.driver.set_active(driver)
    compiler.CompiledKernel._init_handles = init_handles
    try:
        # A failing ptxas makes Triton print the whole PTX.
        with contextlib.redirect_stdout(io.StringIO()):
            yield compiled
    finally:
        compiler.CompiledKernel._init_handles = initialise
        triton.runtime.driver._active = None
        if clear is not None:
            clear()


# Kernels are cached per device. Each capability is a device, and each fresh run one more.
_fresh_devices = itertools.count(1000)


class _DryDriver:
    """What Triton asks of a CUDA driver, answered without one."""

    def __init__(self, capability: int, device: int) -> None:
        self._device = device
        self._capability = capability
        self.utils = _DryUtils(capability)

    def launcher_cls(self, src: Any, metadata: Any) -> Any:
        return lambda *arguments, **named: None

    def get_current_device(self) -> int:
        return self._device

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cuda

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind

    def is_active(self) -> bool:
        return True

    def assemble_tensormap_to_arg(self, info: Any, arguments: Any) -> Any:
        return arguments


class _DryUtils:
    def __init__(self, capability: int) -> None:
        self._capability = capability

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: Any) -> None: ...

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {
            "max_shared_mem": SHARED_MEMORY[self._capability],
            "multiprocessor_count": 132,
            "max_num_regs": 65536,
            "warpSize": 32,
            "sm_clock_rate": 1_830_000,
            "mem_clock_rate": 3_201_000,
            "mem_bus_width": 6144,
        }


class Report:
    """What one compiled kernel takes and does."""

    def __init__(self, kernel: Any) -> None:
        self.name: str = kernel.metadata.name
        self.num_warps: int = kernel.metadata.num_warps
        self.shared_bytes: int = kernel.metadata.shared
        self.ttgir: str = kernel.asm["ttgir"]
        self._cubin: bytes = kernel.asm["cubin"]

    @cached_property
    def _resources(self) -> dict[str, int]:
        text = _tool("cuobjdump", ["--dump-resource-usage"], self._cubin)
        return {name: int(value) for name, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", text)}

    @property
    def registers(self) -> int:
        return self._resources["REG"]

    @property
    def spills(self) -> int:
        """Instructions that put registers on the stack or fetch them back: ptxas reserves frames that it never uses."""
        # Without a frame there is none, which takes no disassembly to know.
        return self.count(r"\b(STL|LDL)\b") if self._resources["STACK"] else 0

    @cached_property
    def lines(self) -> list[str]:
        """The machine code: instructions and labels."""
        text = _tool("nvdisasm", ["-c"], self._cubin)
        return [line for line in text.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/|^\s*\.L_x_\d+:", line)]

    @property
    def programs_per_multiprocessor(self) -> int:
        """How many programs fit at once, by registers, shared memory and warps."""
        registers = -(-self.registers // 8) * 8 * 32 * self.num_warps
        return min(65536 // registers, 233_472 // (self.shared_bytes + 1024), 64 // self.num_warps, 32)

    def count(self, pattern: str) -> int:
        return _count(self.lines, pattern)

    @cached_property
    def loops(self) -> list[list[str]]:
        """The instructions of each innermost loop, in order."""
        labels: dict[str, int] = {}
        code: list[str] = []
        spans: list[tuple[int, int]] = []
        for line in self.lines:
            label = re.match(r"\s*(\.L_x_\d+):", line)
            if label:
                labels[label[1]] = len(code)
                continue
            code.append(line)
            jump = re.search(r"BRA.*?`\((\.L_x_\d+)\)", line)
            if jump and jump[1] in labels:
                spans.append((labels[jump[1]], len(code)))
        inner = [a for a in spans if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in spans)]
        return [code[begin:end] for begin, end in inner]

    @property
    def product_loops(self) -> list[list[str]]:
        """The innermost loops that hold matrix instructions."""
        return [loop for loop in self.loops if _count(loop, r"\b[HQI]G?MMA") > 0]

    def matrix_buffers(self) -> list[tuple[int, ...]]:
        """Shapes (depth, rows, columns) of the buffers in shared memory that hold more than one tile."""
        shapes = re.findall(r"memdesc<(\d+)x(\d+)x(\d+)x", self.ttgir)
        return sorted({tuple(map(int, shape)) for shape in shapes if int(shape[0]) > 1})

    def matrix_layouts(self) -> set[tuple[str, str]]:
        """(warps along rows and columns, instruction shape) of the matrix products."""
        pattern = r"#ttg\.nvidia_mma<\{.*?warpsPerCTA = \[([\d, ]+)\].*?instrShape = \[([\d, ]+)\]"
        return set(re.findall(pattern, self.ttgir))

    def issue_share(self, loop_bytes: int, bytes_per_cycle: float) -> float:
        """Cycles that issuing the longest product loop's instructions takes, over those that fetching its bytes takes.

        Four schedulers of a multiprocessor issue one instruction each per cycle; `bytes_per_cycle` is the memory's
        bandwidth per multiprocessor.
        """
        longest = max(self.product_loops, key=len)
        return len(longest) * self.num_warps / 4 / (loop_bytes / bytes_per_cycle)


def _count(lines: list[str], pattern: str) -> int:
    return sum(bool(re.search(pattern, line)) for line in lines)


def _tool(name: str, options: list[str], cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
