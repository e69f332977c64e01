"""Runs prepared requests and sends what they make, whole or as a stream of chunks.

Between the front door and the formats; knows neither bodies nor routes.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import reduce
from operator import add
from typing import TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from router.front import FrontDoor
from router.openai.chat import ChatFormat
from router.openai.completions import CompletionFormat
from router.openai.schema import AnswerForm
from router.openai.shapes import Json, usage_so_far_json
from router.openai.transport import EventStream, dump, unless_gone
from router.prepared import Prepared
from router.requests import AnswerBuilder, ChoiceEnd, Event, TextDelta, Usage

Writer: TypeAlias = ChatFormat | CompletionFormat


async def respond(
    front: FrontDoor, request: Request, form: AnswerForm, prepared: Sequence[Prepared], writer: Writer
) -> Response:
    """The answer to `request`; a client that leaves ends the work."""
    if form.stream:
        return EventStream(_chunks(front, form, prepared, writer), on_error=front.metrics.refused)
    body = await unless_gone(request.receive, _whole(front, prepared, writer))
    return Response(dump(body), media_type="application/json")


async def _whole(front: FrontDoor, prepared: Sequence[Prepared], writer: Writer) -> Json:
    builders = [AnswerBuilder() for _ in prepared]
    async with front.answer_all(prepared) as events:
        async for position, event in events:
            builders[position].add(event)
    return writer.body([builder.build() for builder in builders])


@contextlib.asynccontextmanager
async def _chunks(
    front: FrontDoor, form: AnswerForm, prepared: Sequence[Prepared], writer: Writer
) -> AsyncIterator[AsyncIterator[Json]]:
    async with front.answer_all(prepared) as events:

        async def chunks() -> AsyncIterator[Json]:
            usages: list[Usage] = []
            running = _RunningUsage(form, prepared)
            async for position, event in events:
                if isinstance(event, Usage):
                    usages.append(event)
                for chunk in running.with_usage(writer.chunks(position, event), position, event):
                    yield chunk
            if form.include_usage:
                yield writer.usage_chunk(reduce(add, usages))

        yield chunks()


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
