"""Workloads as they are written down or made up: when requests come, and how long prompts and answers are.

Knows lengths and times alone; what becomes of them is the business of whoever simulates (`octavo plan`) or asks
(`octavo bench`). A trace holds one JSON object a line:

    {"at_s": 0.5, "prompt_tokens": 512, "output_tokens": 128, "tenant": "a", "priority": 0, "prefix": "x",
     "prefix_tokens": 256}

of which the first three are required. Prompts of one `prefix` and tenant begin with the same `prefix_tokens` tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from random import Random

_JSON_TYPES: dict[object, tuple[type, ...]] = {"float": (int, float), "int": (int,), "str": (str,)}
_LATEST_S = 1e9
_LARGEST_SIGMA = 10.0


@dataclass(frozen=True)
class Sizes:
    """A distribution of lengths: `draw` gives whole tokens, at least 1."""

    text: str
    _sample: Callable[[Random], float]

    def draw(self, random: Random) -> int:
        """One length."""
        return max(1, round(self._sample(random)))


def parse_sizes(text: str) -> Sizes:
    """512 | uniform:LOW:HIGH | exponential:MEAN | lognormal:MEDIAN:SIGMA. Raises ValueError naming what is wrong."""
    kind, *words = text.split(":")
    try:
        numbers = [float(word) for word in (words or [kind])]
    except ValueError:
        raise ValueError(f"{text!r} holds a word that is no number") from None
    if any(not 0 < number < 1e9 for number in numbers):
        raise ValueError(f"{text!r} holds a number that is not above 0 and below a billion")
    match kind, numbers:
        case _, [number] if not words:
            return Sizes(text, lambda random: number)
        case "uniform", [low, high] if low <= high:
            return Sizes(text, lambda random: random.uniform(low, high))
        case "exponential", [mean]:
            return Sizes(text, lambda random: random.expovariate(1 / mean))
        case "lognormal", [median, sigma] if sigma <= _LARGEST_SIGMA:
            return Sizes(text, lambda random: median * random.lognormvariate(0, sigma))
    raise ValueError(
        f"{text!r} is none of N, uniform:LOW:HIGH (LOW at most HIGH), exponential:MEAN, "
        f"lognormal:MEDIAN:SIGMA (SIGMA at most {_LARGEST_SIGMA:g})"
    )


@dataclass(frozen=True)
class Entry:
    """One line of a trace: a request."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    priority: int = 0
    prefix: str = ""
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.prefix_tokens < 0:
            raise ValueError(f"prefix_tokens is {self.prefix_tokens}; it must be at least 0")
        if not 0 <= self.at_s < _LATEST_S:
            raise ValueError(f"at_s is {self.at_s}; it must be at least 0 and below {_LATEST_S:g}")


_KINDS = {field.name: _JSON_TYPES[field.type] for field in fields(Entry)}
_REQUIRED = [field.name for field in fields(Entry) if field.default is MISSING]


@dataclass(frozen=True)
class Mix:
    """A made-up workload."""

    requests_per_s: float
    num_requests: int
    prompt_tokens: Sizes
    output_tokens: Sizes
    num_prefixes: int = 0
    """Prompts begin with one of so many prefixes; 0: all are distinct."""
    prefix_tokens: int = 0
    seed: int = 0

    def entries(self) -> list[Entry]:
        """Poisson arrivals; the same for the same seed."""
        random, at_s, found = Random(self.seed), 0.0, []
        for _ in range(self.num_requests):
            at_s += random.expovariate(self.requests_per_s)
            prefix = f"p{random.randrange(self.num_prefixes)}" if self.num_prefixes else ""
            entry = Entry(
                at_s=at_s,
                prompt_tokens=self.prompt_tokens.draw(random),
                output_tokens=self.output_tokens.draw(random),
                prefix=prefix,
                prefix_tokens=self.prefix_tokens if prefix else 0,
            )
            found.append(entry)
        return found


def read_entries(lines: Iterable[str]) -> list[Entry]:
    """The requests of a trace, by time. Raises ValueError with the line's number for one that is none."""
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            found.append(_entry(json.loads(line)))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not found:
        raise ValueError("it holds no request")
    return sorted(found, key=attrgetter("at_s"))


def _entry(found: object) -> Entry:
    if not isinstance(found, dict):
        raise ValueError(f"it holds a {type(found).__name__}, expected an object")
    for name, value in found.items():
        if name not in _KINDS:
            raise ValueError(f"{name!r} is none of {', '.join(_KINDS)}")
        if isinstance(value, bool) or not isinstance(value, _KINDS[name]):
            raise ValueError(f"{name} is {value!r}")
    if missing := [name for name in _REQUIRED if name not in found]:
        raise ValueError(f"it lacks {' and '.join(missing)}")
    return Entry(**found)
