"""What every request of a benchmark says beside its prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """`ignore_eos` makes every answer as long as asked; `is_chat` asks as a conversation of one message."""

    temperature: float = 0.0
    ignore_eos: bool = True
    is_chat: bool = False
