"""The requests of each run, from what the options say: a file, a trace, or lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from octavo.bench.load import Load
from octavo.bench.options import ANSWER_LENGTHS, BenchConfig
from octavo.bench.prompts import (
    Example,
    as_text,
    choose,
    find_pool,
    from_entries,
    from_examples,
    read_examples,
    with_answer_lengths,
)
from octavo.bench.records import BenchRequest, Target
from octavo.options import OptionError
from octavo.workload import Entry, Mix, read_entries


@dataclass(frozen=True)
class Source:
    """What a file gave; both empty where prompts are made up."""

    examples: tuple[Example, ...] = ()
    entries: tuple[Entry, ...] = ()


def read_source(config: BenchConfig) -> Source:
    """Read the file that the options name, if one. Raises OptionError for one that cannot be used."""
    flag, name = ("--prompts", config.prompts) if config.prompts is not None else ("--trace", config.trace)
    if name is None:
        return Source()
    try:
        if flag == "--prompts":
            return Source(examples=tuple(read_examples(Path(name))))
        return Source(entries=tuple(read_entries(Path(name).read_text(encoding="utf-8").splitlines())))
    except (OSError, ValueError) as error:
        raise OptionError(flag, name, str(error), "See docs/benchmarking.md for what it may hold") from None


class Workload:
    """Makes the requests of one run after another."""

    def __init__(self, config: BenchConfig, source: Source, target: Target, pool: Sequence[int]) -> None:
        self._config = config
        self._source = source
        self._target = target
        self._pool = pool
        self._answer_lengths: dict[str, int] = {}

    @classmethod
    async def open(cls, config: BenchConfig, source: Source, target: Target) -> Workload:
        """Ask the server for what making prompts takes. Raises AskError, ValueError."""
        if not source.examples:
            return cls(config, source, target, await find_pool(target, config.vocab_size))
        if config.output_tokens == ANSWER_LENGTHS:
            source = Source(examples=tuple(one for one in source.examples if one.answer or one.output_tokens))
            if not source.examples:
                raise ValueError(f"no prompt of {config.prompts} has an answer whose length could be taken")
        return cls(config, source, target, ())

    def describe(self) -> str:
        """In a line."""
        config = self._config
        if self._source.examples:
            return f"{len(self._source.examples)} prompts of {config.prompts}, output {config.output_tokens} tokens"
        if self._source.entries:
            return f"{len(self._source.entries)} requests of {config.trace}"
        shared = f", {config.num_prefixes} shared prefixes of {config.prefix_tokens}" if config.num_prefixes else ""
        return f"made-up prompts of {config.prompt_tokens} tokens{shared}, output {config.output_tokens} tokens"

    async def requests(self, load: Load, run: str) -> list[BenchRequest]:
        """The requests of the run of that name at a load. Raises AskError where text must be made of ids."""
        config = self._config
        number = config.num_requests_at(load)
        salt = f"octavo-bench-{config.seed}-{run}".replace(" ", "-")[:128] if config.salt_cache else ""
        if self._source.examples:
            random = Random(f"{config.seed} {run}")
            chosen = choose(self._source.examples, number, random)
            if config.output_tokens == ANSWER_LENGTHS:
                chosen = await with_answer_lengths(self._target, chosen, self._answer_lengths)
            return from_examples(chosen, config.output_sizes, random, salt)
        entries = self._source.entries[: config.num_requests] or self._made_up(number, run)
        made = from_entries(entries, self._pool, f"{config.seed} {run}", salt)
        return await as_text(self._target, made) if config.endpoint == "chat" else made

    def _made_up(self, number: int, run: str) -> list[Entry]:
        """Their times are of no meaning: the load gives them."""
        config = self._config
        seed = Random(f"{config.seed} lengths {run}").getrandbits(32)
        mix = Mix(
            1.0,
            number,
            config.prompt_sizes,
            config.output_sizes,
            config.num_prefixes,
            config.prefix_tokens,
            seed,
        )
        return mix.entries()
