"""Runs prepared requests and sends what they make, whole or as a stream of chunks.

Between the front door and the formats; knows neither bodies nor routes.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from router.errors import RouterError
from router.front import FrontDoor
from router.openai.event_stream import EventStream
from router.openai.lines import EventLines, Writer
from router.openai.schema import AnswerForm
from router.openai.shapes import Json
from router.openai.transport import dump, unless_gone
from router.prepared import Prepared
from router.requests import AnswerBuilder


async def respond(
    front: FrontDoor, request: Request, form: AnswerForm, prepared: Sequence[Prepared], writer: Writer
) -> Response:
    """The answer to `request`; a client that leaves ends the work."""
    if form.stream:
        lines = EventLines(writer, form, prepared)

        def on_error(error: RouterError) -> None:
            front.refused(error, prepared[0].shown_id)

        return EventStream(front.answer_all(prepared), lines.write, lines.last, on_error)
    body = await unless_gone(request.receive, _whole(front, prepared, writer))
    return Response(dump(body), media_type="application/json")


async def _whole(front: FrontDoor, prepared: Sequence[Prepared], writer: Writer) -> Json:
    builders = [AnswerBuilder() for _ in prepared]
    async with front.answer_all(prepared) as events:
        async for position, event in events:
            builders[position].add(event)
    return writer.body([builder.build() for builder in builders])
