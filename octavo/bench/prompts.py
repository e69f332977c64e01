"""What is asked: prompts from a file, a trace, or made up from lengths, as requests of one run.

Made-up prompts are token ids drawn from a pool of ids that the server knows. Each run draws anew, so that no run finds
the prompts of an earlier one in the server's prefix cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from octavo.bench.records import BenchRequest, Target
from octavo.workload import Entry, Sizes

POOL_TEXT = (
    "The harbour was quiet when the first boats came home. Nets hung over the rails, silver scales stuck to every "
    "plank, and the gulls that had followed them since dawn settled along the wall to wait. A woman with a ledger "
    "walked from mooring to mooring, counting crates, asking each captain about the weather further out, and writing "
    "down numbers that nobody else would read. Behind her the market opened: bread, onions, lamp oil, two clocks that "
    "disagreed, a table of used books. Children ran between the stalls with letters from one merchant to another, and "
    "an old teacher explained to anyone who listened how tides, moons and arithmetic belong together. By noon the "
    "streets smelled of coffee and tar; by evening lanterns moved uphill, windows closed, rain began, and only the "
    "lighthouse kept turning its slow bright circle over the water, the rocks, and the sleeping town."
)
"""English whose tokens are the pool that made-up prompts are drawn from."""


@dataclass(frozen=True)
class Example:
    """A prompt of a file, with the answer that the file gives and its length, where it does."""

    prompt: str
    answer: str | None = None
    output_tokens: int | None = None


def read_examples(path: Path) -> list[Example]:
    """The prompts of a file: of .jsonl and .json those of its objects, of any other file its lines.

    An object is ShareGPT's ({"conversations": [{"from", "value"}]}), OpenAI's ({"messages": [{"role", "content"}]}),
    Alpaca's ({"instruction", "input", "output"}) or {"prompt", "answer", "output_tokens"}, the prompt alone required.
    Of a conversation the first question and its answer count; collections hold some that ask nothing, which are left
    out. Raises ValueError naming the place of what is none of these.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".json", ".jsonl"):
        found = [Example(line) for line in text.splitlines() if line.strip()]
    else:
        read = (_example(place, value) for place, value in _values(path, text))
        found = [example for example in read if example is not None]
    if not found:
        raise ValueError("it holds no prompt")
    return found


def choose(examples: Sequence[Example], num_requests: int, random: Random) -> list[Example]:
    """So many examples: all of them in random order, again and again."""
    order: list[Example] = []
    while len(order) < num_requests:
        order += random.sample(examples, len(examples))
    return order[:num_requests]


def from_examples(
    examples: Sequence[Example], sizes: Sizes, random: Random, cache_salt: str = ""
) -> list[BenchRequest]:
    """A request for each; those of no length of their own get one of `sizes`."""
    return [
        BenchRequest(each.prompt, each.output_tokens or sizes.draw(random), cache_salt=cache_salt) for each in examples
    ]


def from_entries(entries: Sequence[Entry], pool: Sequence[int], run: str, cache_salt: str = "") -> list[BenchRequest]:
    """Prompts of the lengths of the entries. `run` names the run: other names give other prompts."""
    found = []
    for number, entry in enumerate(entries):
        num_shared = min(entry.prefix_tokens, entry.prompt_tokens)
        common = Random(f"{run} prefix {entry.tenant} {entry.prefix}").choices(pool, k=num_shared)
        own = Random(f"{run} own {number}").choices(pool, k=entry.prompt_tokens - num_shared)
        prompt = (*common, *own)
        found.append(BenchRequest(prompt, entry.output_tokens, entry.at_s, entry.priority, cache_salt))
    return found


async def find_pool(target: Target, vocab_size: int | None) -> list[int]:
    """Ids to draw prompts from: those of an English text, or every one below `vocab_size`. Raises AskError."""
    if vocab_size is not None:
        return list(range(vocab_size))
    return sorted(set(await target.tokenize(POOL_TEXT)))


async def with_answer_lengths(target: Target, examples: Sequence[Example], lengths: dict[str, int]) -> list[Example]:
    """The examples, each with the length of its own answer in tokens. Raises AskError.

    `lengths` are those of the answers that the server has read, and gains those of others: each is read once.
    """
    found = []
    for example in examples:
        length, answer = example.output_tokens, example.answer or ""
        if length is None:
            if answer not in lengths:
                lengths[answer] = max(1, len(await target.tokenize(answer)))
            length = lengths[answer]
        found.append(replace(example, output_tokens=length))
    return found


async def as_text(target: Target, requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    """The requests with text in place of token ids; its tokens are then about as many. Raises AskError."""
    found = []
    for request in requests:
        prompt = request.prompt if isinstance(request.prompt, str) else await target.detokenize(request.prompt)
        found.append(BenchRequest(prompt, request.max_tokens, request.at_s, request.priority, request.cache_salt))
    return found


def _values(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Each JSON value and its place. Raises ValueError."""
    if path.suffix == ".json":
        whole = json.loads(text)
        if not isinstance(whole, list):
            raise ValueError(f"it holds a {type(whole).__name__}, expected a list")
        yield from ((f"entry {number}", value) for number, value in enumerate(whole, 1))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None


def _example(place: str, value: Any) -> Example | None:
    """What an object asks; None for a conversation that asks nothing. Raises ValueError."""
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict):
        raise ValueError(f"{place} holds a {type(value).__name__}, expected an object or text")
    for name, read in _FORMS.items():
        if name in value:
            try:
                example = read(value)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{place}: {name} is not understood ({error!r})") from None
            if example is not None and (not isinstance(example.prompt, str) or not example.prompt):
                raise ValueError(f"{place}: its prompt is {example.prompt!r}, expected text")
            return example
    raise ValueError(f"{place} has none of {', '.join(_FORMS)}")


def _plain(value: Mapping[str, Any]) -> Example:
    length = value.get("output_tokens", value.get("max_tokens"))
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
        raise TypeError(f"output_tokens is {length!r}")
    return Example(value["prompt"], value.get("answer"), length)


def _alpaca(value: Mapping[str, Any]) -> Example:
    more = value.get("input")
    return Example(f"{value['instruction']}\n\n{more}" if more else value["instruction"], value.get("output"))


def _conversation(value: Mapping[str, Any]) -> Example | None:
    if "messages" in value:
        turns = [(turn["role"], turn["content"]) for turn in value["messages"]]
    else:
        turns = [(turn["from"], turn["value"]) for turn in value["conversations"]]
    first = next((index for index, (speaker, _) in enumerate(turns) if speaker in ("human", "user")), None)
    if first is None or turns[first][1] == "":
        return None
    answer = turns[first + 1][1] if first + 1 < len(turns) else None
    return Example(turns[first][1], answer)


_FORMS: Mapping[str, Callable[[Mapping[str, Any]], Example | None]] = {
    "prompt": _plain,
    "instruction": _alpaca,
    "conversations": _conversation,
    "messages": _conversation,
}
