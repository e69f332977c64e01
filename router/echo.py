"""An answer that begins with its prompt: events in, events out."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from router.prepared import Prepared
from router.requests import ChoiceEnd, Event, TextDelta


def prompt_text(prepared: Prepared) -> str:
    """The prompt as the client wrote it, or as its ids read."""
    if prepared.prompt_text is not None:
        return prepared.prompt_text
    return prepared.text.tokenizer.decode(prepared.prompt_ids)


async def with_prompt(events: AsyncGenerator[Event, None], prepared: Prepared) -> AsyncGenerator[Event, None]:
    """The same events; before a choice's first text stands the prompt's."""
    begun: set[int] = set()
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, (TextDelta, ChoiceEnd)) and event.index not in begun:
                begun.add(event.index)
                yield TextDelta(event.index, prompt_text(prepared), 0, ())
            yield event
