"""The scripted model says what it was told to, through the worker's own runner."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from octavo.internal.v1 import types_pb2
from tests.fakes.scripted_model import Script, ScriptedModel, write_scripted_model
from tests.worker.harness import Driver, build_runner, sampling

THUMB = "👍".encode()


def answer(model: ScriptedModel, prompt: str, num_tokens: int) -> tuple[list[int], Tokenizer, int]:
    tokenizer = Tokenizer.from_file(str(model.directory / "tokenizer.json"))
    driver = Driver(build_runner(model.directory))
    params = sampling(max_tokens=num_tokens, end_token_ids=[model.end_id])
    sequence = driver.add(tokenizer.encode(prompt).ids, params)
    driver.finish(sequence)
    return sequence.output, tokenizer, sequence.finish


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (Script([" leading", " x", THUMB[:1], THUMB[1:], "\n"]), " leading x👍\n"),
        (Script([" leading", *(bytes([value]) for value in THUMB)], style="byte_fallback"), " leading👍"),
        (Script(["a" * n for n in range(1, 100)]), "a" * 4950),
    ],
    ids=["byte_level", "byte_fallback", "long"],
)
def test_the_script_follows_the_trigger(tmp_path: Path, script: Script, text: str) -> None:
    model = write_scripted_model(tmp_path, script)
    output, tokenizer, finish = answer(model, "Whatever came before:", 200)
    assert output == list(model.script_ids[:-1])
    assert finish == types_pb2.FINISH_REASON_END_TOKEN
    prompt_ids = tokenizer.encode("Whatever came before:").ids
    whole, before = tokenizer.decode([*prompt_ids, *output]), tokenizer.decode(prompt_ids)
    assert whole.removeprefix(before) == text


def test_a_script_without_an_end_starts_over(tmp_path: Path) -> None:
    model = write_scripted_model(tmp_path, Script(["ab", "cd"], ends=False))
    output, _, finish = answer(model, ":", 5)
    first, second = model.script_ids
    assert (output, finish) == ([first, second, first, second, first], types_pb2.FINISH_REASON_LENGTH)


def test_special_tokens_may_be_scripted(tmp_path: Path) -> None:
    model = write_scripted_model(tmp_path, Script(["ab", "<|eot|>", "cd"], specials=["<|eot|>"]))
    output, tokenizer, _ = answer(model, ":", 10)
    assert tokenizer.decode(output, skip_special_tokens=False) == "ab<|eot|>cd"


@pytest.mark.parametrize("pieces", [["ab", "ab"], [":"]])
def test_a_token_twice_is_refused(tmp_path: Path, pieces: list[str]) -> None:
    with pytest.raises(ValueError, match=r"twice|different"):
        write_scripted_model(tmp_path, Script(pieces))
