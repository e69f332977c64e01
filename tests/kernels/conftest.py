"""Every kernel test runs over every backend named here; one that cannot load is skipped with its reason.

In the interpreter's own process that is the Triton kernels alone: see triton/test_triton_jobs.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kernel_steps import OpenBackend

from kernels.api import Backend
from kernels.select import open_backend

sys.path.append(str(Path(__file__).parent / "triton"))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
BACKENDS = ("triton",) if INTERPRETED else ("reference", "cpu")


def open_named(name: str, num_threads: int) -> Backend:
    """A backend with that many threads; what Triton's interpreter runs has no use for them."""
    if name != "triton":
        return open_backend(name, num_threads)
    from interpreter import interpreted_backend

    return interpreted_backend()


@pytest.fixture(params=BACKENDS)
def open_with_threads(request: pytest.FixtureRequest) -> Iterator[OpenBackend]:
    """Opens the backend under test with a number of threads; torch's own count is put back afterwards."""
    threads = torch.get_num_threads()
    try:
        open_named(request.param, 1)
    except RuntimeError as error:
        pytest.skip(str(error))
    yield lambda num_threads: open_named(request.param, num_threads)
    torch.set_num_threads(threads)


@pytest.fixture
def backend(open_with_threads: OpenBackend) -> Backend:
    """The backend under test with one thread."""
    return open_with_threads(1)
