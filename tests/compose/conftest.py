"""Marks the tests of the containers: they want an engine and images, which tools/prepare_compose.sh makes ready."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/compose/" in str(item.path):
            item.add_marker(pytest.mark.compose)
