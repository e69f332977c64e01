"""Prompts from files of every form, and made-up ones: their lengths, shared beginnings and freshness."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from octavo.bench.prompts import Example, choose, from_entries, from_examples, read_examples, with_answer_lengths
from octavo.bench.records import BenchRequest
from octavo.workload import Entry, parse_sizes

SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"},
    ]
}
MESSAGES = {"messages": [{"role": "user", "content": "q"}]}
ALPACA = {"instruction": "do", "input": "this", "output": "done"}
PLAIN = {"prompt": "p", "output_tokens": 7}


def write(path: Path, content: object) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_every_form_of_file_is_read(tmp_path: Path) -> None:
    assert read_examples(write(tmp_path / "a.txt", "one\n\ntwo\n")) == [Example("one"), Example("two")]
    expected = [
        Example("q", "a"),
        Example("q"),
        Example("do\n\nthis", "done"),
        Example("p", None, 7),
        Example("text"),
    ]
    values = [SHAREGPT, MESSAGES, ALPACA, PLAIN, "text"]
    assert read_examples(write(tmp_path / "a.json", values)) == expected
    assert read_examples(write(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, values)))) == expected
    assert read_examples(write(tmp_path / "b.json", [{"instruction": "do", "input": ""}])) == [Example("do")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "\n", "no prompt"),
        ("a.json", {}, "expected a list"),
        ("a.json", [3], "entry 1 holds a int"),
        ("a.jsonl", '{"prompt": "p"}\n{', "line 2"),
        ("a.jsonl", '{"question": "p"}', "line 1 has none of prompt, instruction"),
        ("a.json", [{"prompt": ""}], "entry 1: its prompt is ''"),
        ("a.json", [{"prompt": "p", "output_tokens": True}], "output_tokens is True"),
        ("a.json", [{"conversations": [{"from": "gpt", "value": "a"}]}], "no prompt"),
        ("a.json", [{"conversations": [{"value": "a"}]}], "entry 1: conversations is not understood"),
    ],
)
def test_what_is_no_prompt_is_named(name: str, content: object, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        read_examples(write(tmp_path / name, content))


@pytest.mark.parametrize("turns", [[], [("gpt", "a")], [("human", ""), ("gpt", "a")], [("system", "s")]], ids=str)
def test_conversations_that_ask_nothing_are_left_out(turns: list[tuple[str, str]], tmp_path: Path) -> None:
    silent = {"conversations": [{"from": speaker, "value": said} for speaker, said in turns]}
    assert read_examples(write(tmp_path / "a.json", [silent, SHAREGPT, silent])) == [Example("q", "a")]


def test_prompts_of_a_file_are_all_asked_before_one_is_again() -> None:
    examples = [Example(str(number), None, number + 1) for number in range(5)]

    def ask(examples: list[Example], num: int) -> list[BenchRequest]:
        random = Random(1)
        return from_examples(choose(examples, num, random), parse_sizes("9"), random)

    asked = ask(examples, 12)
    assert {request.prompt for request in asked[:5]} == {request.prompt for request in asked[5:10]} == set("01234")
    assert all(request.max_tokens == int(request.prompt) + 1 for request in asked if isinstance(request.prompt, str))
    assert asked == ask(examples, 12)
    assert [request.max_tokens for request in ask([Example("a")], 2)] == [9, 9]


def test_made_up_prompts_have_their_lengths_share_prefixes_and_differ_from_run_to_run() -> None:
    entries = [Entry(0.5 * n, 40, 4 + n, prefix="x", prefix_tokens=30) for n in range(3)]
    pool = range(100, 200)
    first, again, other = (from_entries(entries, pool, run) for run in ("run 0", "run 0", "run 1"))
    assert first == again
    assert [len(request.prompt) for request in first] == [40] * 3
    assert [(request.at_s, request.max_tokens) for request in first] == [(0.0, 4), (0.5, 5), (1.0, 6)]
    assert len({request.prompt[:30] for request in first}) == 1
    assert len({request.prompt[30:] for request in first}) == 3
    assert not {request.prompt[:30] for request in first} & {request.prompt[:30] for request in other}
    assert all(token in pool for request in first for token in request.prompt)


def test_the_server_reads_each_answer_once_whatever_is_repeated() -> None:
    class Reader:
        def __init__(self) -> None:
            self.read: list[str] = []

        async def tokenize(self, text: str) -> list[int]:
            self.read.append(text)
            return list(range(len(text)))

    reader, lengths = Reader(), dict[str, int]()
    target: Any = reader
    examples = [Example("p", "four"), Example("q", "four"), Example("r", ""), Example("s", "not read", 3)]
    for _ in range(3):
        found = asyncio.run(with_answer_lengths(target, examples, lengths))
        assert [example.output_tokens for example in found] == [4, 4, 1, 3]
    assert reader.read == ["four", ""]
