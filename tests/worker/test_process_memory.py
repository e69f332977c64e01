"""Freed memory stays with the process."""

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
