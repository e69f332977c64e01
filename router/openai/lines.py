"""The events of an answer as lines of a server-sent stream. Pure.

What most tokens make is a chunk that differs from the last one of its choice in its text alone: the rest is written
once. All else goes through the formats, which alone know what a chunk is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from json.encoder import encode_basestring
from operator import add
from typing import TypeAlias

from router.openai.chat import ChatFormat
from router.openai.completions import CompletionFormat
from router.openai.event_stream import as_event
from router.openai.schema import AnswerForm
from router.openai.shapes import Json, usage_so_far_json
from router.openai.transport import dump
from router.prepared import Prepared
from router.requests import ChoiceEnd, Event, TextDelta, Usage

Writer: TypeAlias = ChatFormat | CompletionFormat

_MARK = "\0"
"""Stands for the text while the rest of a chunk is written: the one character that nothing else in it can hold."""


class EventLines:
    """Writes one answer: `write` for each event in order, `last` when there are no more."""

    def __init__(self, writer: Writer, form: AnswerForm, prepared: Sequence[Prepared]) -> None:
        self._writer = writer
        self._form = form
        self._usage = _RunningUsage(form, prepared)
        self._usages: list[Usage] = []
        self._is_repetitive = not form.token_ids and not form.continuous_usage
        self._frames: dict[tuple[int, int], tuple[str, str]] = {}

    def write(self, item: tuple[int, Event]) -> Sequence[str]:
        """The lines of an event of the prompt at that position, in pieces."""
        position, event = item
        if not self._is_repetitive or type(event) is not TextDelta:
            return self.write_whole(item)
        frame = self._frames.get((position, event.index))
        if frame is None:
            lines = self.write_whole(item)
            self._frames[position, event.index] = self._frame(position, event.index)  # for the choice has begun
            return lines
        if event.logprobs or event.reasoning or event.tool_calls:
            return self.write_whole(item)
        return (f"{frame[0]}{encode_basestring(event.text)}{frame[1]}",) if event.text else ()

    def write_whole(self, item: tuple[int, Event]) -> Sequence[str]:
        """`write`, with every chunk made anew."""
        position, event = item
        if isinstance(event, Usage):
            self._usages.append(event)
        chunks = self._usage.with_usage(self._writer.chunks(position, event), position, event)
        return [as_event(dump(chunk)) for chunk in chunks]

    def last(self) -> Sequence[str]:
        """What stands behind all events."""
        return [as_event(dump(self._writer.usage_chunk(reduce(add, self._usages))))] if self._form.include_usage else ()

    def _frame(self, position: int, index: int) -> tuple[str, str]:
        """What stands before and behind the text of a choice's chunk that holds text and no more."""
        (line,) = self.write_whole((position, TextDelta(index, _MARK, 0, ())))
        before, after = line.split(encode_basestring(_MARK))
        return before, after


class _RunningUsage:
    """What chunks but the last say of usage: null where the last one will tell, counts where they are wanted."""

    def __init__(self, form: AnswerForm, prepared: Sequence[Prepared]) -> None:
        self._form = form
        self._num_prompt_tokens = sum(len(one.prompt_ids) for one in prepared)
        self._num_tokens: dict[tuple[int, int], int] = {}

    def with_usage(self, chunks: Iterator[Json], position: int, event: Event) -> Iterator[Json]:
        if self._form.continuous_usage:
            self._count(position, event)
            usage: Json | None = usage_so_far_json(self._num_prompt_tokens, sum(self._num_tokens.values()))
        elif self._form.include_usage:
            usage = None
        else:
            yield from chunks
            return
        for chunk in chunks:
            yield {**chunk, "usage": usage}

    def _count(self, position: int, event: Event) -> None:
        match event:
            case TextDelta():
                key = (position, event.index)
                self._num_tokens[key] = self._num_tokens.get(key, 0) + len(event.token_ids)
            case ChoiceEnd():  # which counts an end token as well
                self._num_tokens[position, event.index] = event.completion_tokens
