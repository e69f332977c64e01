"""Stacks of real processes for failures that other servers have had; each must be as alive after a case as before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cases.asking import Asker
from tests.e2e.stack import Stack, serving
from tests.fakes.scripted_model import Script, write_scripted_model
from tests.fakes.tiny_llama import TinyLlama, write_tiny_llama

PEPPER = "🌶".encode()
SECOND_END = "<|done|>"
TURN = "<|turn|>"
SPOKEN = " now stop! 🌶 x"
SCRIPT = Script(
    [" now", " stop! ", PEPPER[:2], PEPPER[2:], " x", SECOND_END, "tail"],
    specials=[SECOND_END, TURN],
    generation_config={"eos_token_id": [0, 1], "temperature": 0.1, "top_k": 1},
    tokenizer_config={
        "chat_template": "{% for m in messages %}" + TURN + "{{ m.role }} {{ m.content }}{% endfor %}" + TURN + ":"
    },
)
BLOCK_SIZE = 16
NUM_SPOKEN_TOKENS = 6
"""Those of SPOKEN, and the end token."""

CONTEXT, SMALL_POOL_BLOCKS, CHUNK_TOKENS = 512, 40, 32


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "/cases/" in str(item.path):
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def parrot_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A model that says SPOKEN after any prompt that ends with a colon."""
    model = write_scripted_model(tmp_path_factory.mktemp("cases") / "parrot", SCRIPT)
    with serving(str(model.directory), "--num-kv-blocks", "256", "--num-threads", "1") as running:
        yield running


@pytest.fixture(scope="session")
def crowd_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A random model in fp32 with a pool for few sequences, and steps that take a long prompt in many chunks."""
    model = write_tiny_llama(tmp_path_factory.mktemp("cases") / "crowd", TinyLlama(max_positions=CONTEXT))
    options = ["--num-kv-blocks", str(SMALL_POOL_BLOCKS), "--block-size", str(BLOCK_SIZE), "--num-threads", "1"]
    options += ["--max-num-batched-tokens", str(CHUNK_TOKENS), "--max-num-seqs", str(CHUNK_TOKENS)]
    with serving(str(model), *options) as running:
        yield running


@pytest.fixture
def parrot(parrot_stack: Stack) -> Iterator[Asker]:
    yield from _alive(parrot_stack)


@pytest.fixture
def crowd(crowd_stack: Stack) -> Iterator[Asker]:
    yield from _alive(crowd_stack)


def _alive(stack: Stack) -> Iterator[Asker]:
    asker = Asker(stack)
    yield asker
    asker.assert_alive()
    asker.close()
