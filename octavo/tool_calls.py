"""Joins what comes of tool calls piece by piece. Router and client have types of their own and share the rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar, Protocol, TypeVar


class CallPiece(Protocol):
    """A frozen dataclass that holds more of one tool call."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def index(self) -> int:
        """Which of the answer's calls, from 0."""

    @property
    def arguments(self) -> str:
        """JSON text to append."""


P = TypeVar("P", bound=CallPiece)


def join_calls(pieces: Iterable[P]) -> tuple[P, ...]:
    """Each call whole, in order: the first piece of a call, with the arguments of those that followed."""
    calls: list[P] = []
    for piece in pieces:
        if piece.index == len(calls):
            calls.append(piece)
        else:
            calls[piece.index] = replace(calls[piece.index], arguments=calls[piece.index].arguments + piece.arguments)
    return tuple(calls)
