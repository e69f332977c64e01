"""best_of: of all sequences of a request, the likeliest n are its answer. Pure: events in, events out."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncGenerator
from dataclasses import replace

from router.requests import AnswerBuilder, Event, PromptInfo, QueueInfo, TextDelta
from router.sampling import SamplingParams


async def likeliest(events: AsyncGenerator[Event, None], params: SamplingParams) -> AsyncGenerator[Event, None]:
    """The events of the `params.n` sequences whose tokens' logprobs sum up highest, best first.

    Nothing of an answer comes before the last sequence has ended. Usage counts all of them.
    """
    builder = AnswerBuilder()
    async with contextlib.aclosing(events):
        async for event in events:
            if isinstance(event, (PromptInfo, QueueInfo)):
                yield event
            else:
                builder.add(event)
    answer = builder.build()
    order = sorted(answer.ends, key=lambda index: (-_score(answer.texts[index]), index))
    for number, index in enumerate(order[: params.n]):
        text = answer.texts[index]
        yield text._replace(index=number, logprobs=text.logprobs if params.logprobs is not None else ())
        yield replace(answer.ends[index], index=number)
    yield answer.usage


def _score(text: TextDelta) -> float:
    return math.fsum(info.logprob for info in text.logprobs if info.logprob is not None)
