"""The model directory that the client's tests serve."""

from pathlib import Path

import pytest

from tests.fakes.router_stack import write_text_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text_model(tmp_path_factory.mktemp("model"))
