"""Fixtures: the default model from the user's own cache, so that it is downloaded once."""

from pathlib import Path

import pytest

from octavo.sources import ModelSource, resolve


@pytest.fixture(scope="session")
def smollm2() -> ModelSource:
    return resolve("default")


@pytest.fixture
def smollm2_copy(smollm2: ModelSource, tmp_path: Path) -> Path:
    """The default model's GGUF file under a name of its own, sharing its bytes."""
    copy = tmp_path / "copy.gguf"
    copy.symlink_to(smollm2.weights)
    return copy
