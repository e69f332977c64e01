"""Every kernel test runs over every backend named here; one that cannot load is skipped with its reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from kernel_steps import OpenBackend

from kernels.api import Backend
from kernels.select import open_backend

BACKENDS = ("reference", "cpu")


@pytest.fixture(params=BACKENDS)
def open_with_threads(request: pytest.FixtureRequest) -> Iterator[OpenBackend]:
    """Opens the backend under test with a number of threads; torch's own count is put back afterwards."""
    threads = torch.get_num_threads()
    try:
        open_backend(request.param, 1)
    except RuntimeError as error:
        pytest.skip(str(error))
    yield lambda num_threads: open_backend(request.param, num_threads)
    torch.set_num_threads(threads)


@pytest.fixture
def backend(open_with_threads: OpenBackend) -> Backend:
    """The backend under test with one thread."""
    return open_with_threads(1)
