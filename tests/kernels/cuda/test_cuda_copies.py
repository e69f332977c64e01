"""The CUDA C++ kernels: compiled by nvcc for GPUs that need not be there, and their indices run on the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.cuda.block_copies import SOURCE, launch_arguments
from kernels.cuda.compiler import SOURCES, CudaUnavailable, compile_cubin, find_nvcc
from kernels.cuda.nvrtc import Nvrtc, NvrtcError, find_nvrtc

# CUDA's words for a C++ compiler: a launch is a loop over threads.
SHIM = """
#define __global__
#define __launch_bounds__(n)
#define __restrict__
struct uint4 { unsigned x, y, z, w; };
struct Index { long long x; };
static Index blockIdx, threadIdx, blockDim, gridDim;
static uint4 __ldcs(const uint4* p) { return *p; }
static void __stcs(uint4* p, uint4 value) { *p = value; }
#include "%s"
extern "C" void run(const uint4* src, uint4* dst, const long long* ids, long long pairs, long long planes,
                    long long src_plane, long long dst_plane, long long block) {
    gridDim.x = 5, blockDim.x = 32;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
            copy_blocks(src, dst, ids, pairs, planes, src_plane, dst_plane, block);
}
"""
needs_nvcc = pytest.mark.skipif(find_nvcc() is None, reason="nvcc is not installed: no CUDA C++ is compiled")


@needs_nvcc
@pytest.mark.parametrize("capability", [80, 90])
def test_compiles_and_is_cached(tmp_path: Path, capability: int) -> None:
    cubin = compile_cubin(SOURCE, capability, tmp_path)
    assert cubin[:4] == b"\x7fELF"
    assert b"copy_blocks" in cubin
    (built,) = tmp_path.iterdir()
    written = built.stat().st_mtime_ns
    assert compile_cubin(SOURCE, capability, tmp_path) == cubin
    assert built.stat().st_mtime_ns == written


@needs_nvcc
def test_keeps_eight_loads_of_16_bytes_in_registers(tmp_path: Path) -> None:
    nvcc = find_nvcc()
    assert nvcc is not None
    command = [str(nvcc), "-cubin", "-O3", "-std=c++17", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas=-v"]
    target = tmp_path / "copy.cubin"
    result = subprocess.run(
        [*command, "-o", str(target), str(SOURCES / SOURCE)], capture_output=True, text=True, timeout=300, check=True
    )
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in result.stderr
    registers = int(result.stderr.split("Used ")[1].split(" registers")[0])
    assert 32 <= registers <= 96


@pytest.fixture
def without_nvcc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))


@pytest.mark.usefixtures("without_nvcc")
@pytest.mark.skipif(find_nvrtc() is not None, reason="NVRTC takes nvcc's place here")
def test_without_a_compiler_the_reason_is_given(tmp_path: Path) -> None:
    with pytest.raises(CudaUnavailable, match="nvcc is neither on the PATH nor in CUDA_HOME, and libnvrtc is not"):
        compile_cubin(SOURCE, 90, tmp_path)


@pytest.mark.usefixtures("without_nvcc")
def test_a_compiler_that_does_not_run_is_a_reason_too(tmp_path: Path) -> None:
    """The start goes on: the Triton kernel copies."""
    broken = tmp_path / "nvcc"
    broken.write_text("#!/bin/sh\necho 'no licence' >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(CudaUnavailable, match=r"nvcc --version failed:\nno licence"):
        compile_cubin(SOURCE, 90, tmp_path / "cache")


@pytest.mark.usefixtures("without_nvcc")
@pytest.mark.skipif(find_nvrtc() is None, reason="NVRTC is not installed; torch's CUDA builds bring it")
@pytest.mark.parametrize("capability", [80, 90])
def test_nvrtc_compiles_where_there_is_no_nvcc(tmp_path: Path, capability: int) -> None:
    cubin = compile_cubin(SOURCE, capability, tmp_path / "cache")
    assert cubin[:4] == b"\x7fELF"
    assert b"copy_blocks" in cubin


class _Calls:
    """An NVRTC that compiles a source to its own name and options, or finds fault with it."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.options: list[bytes] = []
        self.nvrtcGetErrorString = _Named(b"out of luck")

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 13, 2
        return 0

    def nvrtcCreateProgram(self, program: Any, text: bytes, name: bytes, *headers: object) -> int:
        assert text == (SOURCES / SOURCE).read_bytes()
        return 0 if name == SOURCE.encode() else 1

    def nvrtcCompileProgram(self, program: object, count: int, options: Any) -> int:
        self.options = list(options[:count])
        return self.status

    def nvrtcGetCUBINSize(self, program: object, size: Any) -> int:
        size._obj.value = 5
        return 0

    def nvrtcGetCUBIN(self, program: object, buffer: Any) -> int:
        buffer.raw = b"\x00cubn"
        return 0

    def nvrtcGetProgramLogSize(self, program: object, size: Any) -> int:
        size._obj.value = 9
        return 0

    def nvrtcGetProgramLog(self, program: object, buffer: Any) -> int:
        buffer.raw = b"line 3: ?"
        return 0

    def nvrtcDestroyProgram(self, program: object) -> int:
        return 0


class _Named:
    def __init__(self, name: bytes) -> None:
        self._name = name

    def __call__(self, status: int) -> bytes:
        return self._name


def test_nvrtc_is_asked_for_one_architecture_and_its_log_is_the_error() -> None:
    calls: Any = _Calls()
    nvrtc = Nvrtc(calls)
    assert nvrtc.version == "13.2"
    assert nvrtc.compile(SOURCES / SOURCE, "90a") == b"\x00cubn"
    assert calls.options == [b"--gpu-architecture=sm_90a", b"--std=c++17"]
    faulty: Any = _Calls(status=6)
    with pytest.raises(NvrtcError, match=r"copy_blocks\.cu: line 3: \?"):
        Nvrtc(faulty).compile(SOURCES / SOURCE, "80")


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("block_bytes", [16, 4096, 16 * 517])
def test_copies_the_named_blocks_of_every_plane_and_no_others(tmp_path: Path, block_bytes: int) -> None:
    program, library = tmp_path / "shim.cpp", tmp_path / "shim.so"
    program.write_text(SHIM % (SOURCES / SOURCE))
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-Wno-unknown-pragmas", "-o", str(library), str(program)]
    subprocess.run(command, timeout=120, check=True)
    generator = torch.Generator().manual_seed(0)
    src = torch.randint(0, 256, (6, 9, block_bytes), dtype=torch.uint8, generator=generator)
    dst = torch.randint(0, 256, (6, 4, block_bytes), dtype=torch.uint8, generator=generator)
    expected = dst.clone()
    expected[:, [2, 0, 3]] = src[:, [8, 1, 4]]
    pairs = torch.tensor([[8, 1, 4], [2, 0, 3]])
    ctypes.CDLL(str(library)).run(*(ctypes.c_longlong(value) for value in launch_arguments(src, dst, pairs)))
    assert torch.equal(dst, expected)


def test_blocks_that_do_not_fit_are_refused() -> None:
    pairs = torch.zeros(2, 1, dtype=torch.int64)
    blocks = torch.zeros(2, 3, 32, dtype=torch.uint8)
    for other in (blocks[:1], torch.zeros(2, 3, 16, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="must agree in planes"):
            launch_arguments(blocks, other, pairs)
    with pytest.raises(ValueError, match="multiple of 16"):
        launch_arguments(torch.zeros(2, 3, 24, dtype=torch.uint8), torch.zeros(2, 3, 24, dtype=torch.uint8), pairs)
    with pytest.raises(ValueError, match="int64"):
        launch_arguments(blocks, blocks, pairs.int())
