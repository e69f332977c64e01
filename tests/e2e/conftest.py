"""Stacks of real processes on the default model, shared where a test leaves them as it found them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.stack import Stack, serving

# Too few blocks for what some tests ask at once, so that preemption is part of everything here.
SMALL_POOL_BLOCKS = 96
SMALL_POOL = ("--num-kv-blocks", str(SMALL_POOL_BLOCKS), "--max-model-len", "1024", "--num-threads", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/e2e/" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def stack() -> Iterator[Stack]:
    """The default model with a small KV pool."""
    with serving("default", *SMALL_POOL) as running:
        yield running
