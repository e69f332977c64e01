"""What is asked, whom, and what the asker saw of it. Pure data, and the protocol that each kind of server is asked by.

All times are seconds of the event loop's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class BenchRequest:
    """One request: a prompt as text or token ids, and how many tokens its answer shall have at most."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    at_s: float | None = None
    """When to send it, from the run's begin; None where the load decides."""
    priority: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class Answer:
    """What a server said of an answer that is complete; None where it did not say."""

    num_prompt_tokens: int | None
    num_output_tokens: int | None
    num_cached_tokens: int | None = None


class AskError(Exception):
    """A request that failed. `kind` is what failures are counted by, such as `HTTP 429` or `UNAVAILABLE`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}" if message else kind)
        self.kind = kind


class Target(Protocol):
    """A server that can be asked."""

    @property
    def label(self) -> str:
        """The server's address, as the report names it."""
        ...

    async def ask(self, request: BenchRequest, note_tokens: Callable[[int], None]) -> Answer:
        """Ask, and call `note_tokens` with the number of new tokens whenever some arrive. Raises AskError."""
        ...

    async def tokenize(self, text: str) -> list[int]:
        """The text's token ids, without special ones. Raises AskError where the server does not tell."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The ids' text. Raises AskError where the server does not tell."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


@dataclass
class Record:
    """What happened to one request. Its latencies count from when it was due, so a client that lags hides nothing."""

    due_s: float
    sent_s: float = 0.0
    ended_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    """When tokens came, once for each message that held some."""
    num_arrived_tokens: int = 0
    answer: Answer | None = None
    """None where it failed."""
    error_kind: str | None = None
    error_message: str = ""

    @property
    def is_complete(self) -> bool:
        return self.answer is not None

    @property
    def num_output_tokens(self) -> int:
        """As the server counts them, end tokens included; where it does not say, those that arrived."""
        said = None if self.answer is None else self.answer.num_output_tokens
        return self.num_arrived_tokens if said is None else said

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token; None where none came."""
        return self.arrivals_s[0] - self.due_s if self.arrivals_s else None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None before there are two."""
        if len(self.arrivals_s) < 2 or self.num_output_tokens < 2:
            return None
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (self.num_output_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Times between two arrivals, of which each may bring more than one token (inter-token latency)."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]

    @property
    def e2e_s(self) -> float:
        """From when it was due to its end."""
        return self.ended_s - self.due_s
