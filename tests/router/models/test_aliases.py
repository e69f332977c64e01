"""Aliases over weighted models: shares, stickiness, and how little a change of weights moves."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from router.models.aliases import Alias, sticky_key
from router.models.models_file import ModelEntry, ModelsFileError, read_models_file
from router.requests import ChatPrompt, CompletionPrompt, GenerationRequest, RequestOptions

KEYS = [f"user-{number}" for number in range(4000)]


def test_shares_follow_the_weights() -> None:
    counts = Counter(Alias("a", {"big": 3.0, "new": 1.0}).pick(key) for key in KEYS)
    assert 0.22 < counts["new"] / len(KEYS) < 0.28


def test_a_change_of_weights_moves_keys_one_way_only() -> None:
    before, after = Alias("a", {"big": 95.0, "new": 5.0}), Alias("a", {"big": 80.0, "new": 20.0})
    moved = Counter((before.pick(key), after.pick(key)) for key in KEYS)
    assert moved["new", "big"] == 0
    assert 0.10 < moved["big", "new"] / len(KEYS) < 0.20
    assert Alias("a", {"big": 1.0}).pick("x") == "big"
    assert before.heaviest == "big"
    assert {before.pick(key, frozenset({"new"})) for key in KEYS} == {"new"}
    assert before.pick("x", frozenset({"gone"})) == before.pick("x")


def request(prompt: object = None, messages: object = None, user: str = "") -> GenerationRequest:
    asked = CompletionPrompt(prompt) if messages is None else ChatPrompt(messages)
    return GenerationRequest(asked, options=RequestOptions(user=user))


def test_what_a_request_sticks_by() -> None:
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    later = [*first, {"role": "assistant", "content": "a"}, {"role": "user", "content": "again"}]
    conversation = sticky_key("conversation", "", request(messages=first))
    assert conversation == sticky_key("conversation", "", request(messages=later))
    assert conversation != sticky_key("conversation", "other tenant", request(messages=first))
    assert conversation != sticky_key("conversation", "", request(messages=first[1:]))
    assert sticky_key("user", "", request(messages=first, user="u")) == sticky_key("user", "", request("x", user="u"))
    assert sticky_key("user", "", request(messages=first)) == conversation
    odd: list[Any] = [None, 7, [[1], [2]], "x" * 10_000, {"a": object()}]
    assert all(sticky_key("conversation", "", request(value)) for value in odd)
    assert sticky_key("conversation", "", request(messages=[7, None]))
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert sticky_key("conversation", "", request(messages=[deep]))


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(
        'models.short = "/m/short"\n[models.coder]\npath = "/m/coder"\ntool_call_parser = "hermes"\n'
        '[aliases.chat]\nsticky = "user"\nweights = { base = 9, coder = 1, short = 0 }\n'
    )
    found = read_models_file(path, ["base"])
    assert found.models == {"short": ModelEntry("/m/short"), "coder": ModelEntry("/m/coder", "hermes")}
    assert found.aliases == {"chat": Alias("chat", {"base": 9.0, "coder": 1.0}, "user")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("models = 3", "models must be a table"),
        ("[model.x]", "model is not known"),
        ("models.base = '/m'", "models.base is a model of the command line"),
        ("models.x = 3", "models.x must be a table"),
        ("models.x = {}", "models.x.path"),
        ("models.x = {path = '/m', size = 3}", "models.x.size is not known"),
        ("models.x = {path = '/m', tool_call_parser = 'y'}", "models.x.tool_call_parser must be one of"),
        ("aliases.base = {weights = {base = 1}}", "aliases.base is the name of a model"),
        ("aliases.a = {}", "aliases.a.weights"),
        ("aliases.a = {weights = {other = 1}}", "aliases.a.weights.other: no such model"),
        ("aliases.a = {weights = {base = -1}}", "aliases.a.weights.base must be a number"),
        ("aliases.a = {weights = {base = 0}}", "one over 0"),
        ("aliases.a = {weights = {base = inf}}", "aliases.a.weights.base"),
        ("aliases.a = {weights = {base = 1}, sticky = 'ip'}", "aliases.a.sticky"),
        ("this is no toml", "cannot be read"),
    ],
)
def test_a_bad_file_is_refused_by_its_entry(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(ModelsFileError, match=r"models\.toml") as refused:
        read_models_file(path, ["base"])
    assert said in str(refused.value)
    with pytest.raises(ModelsFileError):
        read_models_file(tmp_path / "missing.toml", ["base"])
