"""Freed memory stays with the process, but for what loading took."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Page faults of making and freeing two 16 MiB arrays twenty times, once the first round has brought their pages.
_COUNT_FAULTS = """
import resource
import numpy as np
from worker_svc.process_memory import keep_freed_memory

def make() -> int:
    arrays = [np.empty(2**24, np.uint8) for _ in range(2)]
    for array in arrays:
        array[::4096] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
before = make()
for _ in range(20):
    after = make()
print(after - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's")
def test_the_same_tensors_again_cost_no_page_faults() -> None:
    answer = subprocess.run([sys.executable, "-c", _COUNT_FAULTS], capture_output=True, text=True, check=True)
    assert int(answer.stdout) < 1000  # a trim between the rounds costs thousands


_COUNT_RESIDENT = """
import gc
from worker_svc.kv_cache import resident_bytes
from worker_svc.process_memory import keep_freed_memory, return_freed_memory

keep_freed_memory()
held = [b"x" * 2**20 for _ in range(200)]
last = bytearray(2**20)  # lies above what is freed, so that the heap's end cannot move
del held
gc.collect()
before = resident_bytes()
return_freed_memory()
print(before - resident_bytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator is glibc's")
def test_what_loading_freed_goes_back() -> None:
    answer = subprocess.run([sys.executable, "-c", _COUNT_RESIDENT], capture_output=True, text=True, check=True)
    assert int(answer.stdout) > 150 * 2**20
