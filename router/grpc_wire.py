"""Answers as octavo.v1's messages; nothing else builds them. `grpc_reading` reads the requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from octavo.v1 import inference_pb2 as pb
from router.errors import InvalidRequest, RouterError
from router.replies.types import ToolCallDelta
from router.requests import (
    Answer,
    ChoiceEnd,
    Event,
    PromptInfo,
    QueueInfo,
    TextDelta,
    TokenInfo,
    Usage,
)

StreamResponse: TypeAlias = pb.GenerateResponse | pb.ChatResponse
UnaryResponse: TypeAlias = pb.GenerateUnaryResponse | pb.ChatUnaryResponse

_FINISH = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}


def write_event(response: StreamResponse, event: Event) -> StreamResponse:
    """Put one event into a response that has its ids already."""
    match event:
        case TextDelta():
            response.delta.CopyFrom(_delta(event))
        case ChoiceEnd():
            response.finished.CopyFrom(_finished(event))
        case Usage():
            response.usage.CopyFrom(_usage(event))
        case PromptInfo():
            response.prompt_logprobs.CopyFrom(_prompt(event))
        case QueueInfo():
            response.queued.position = event.position
            if event.eta_s is not None:
                response.queued.eta_seconds = event.eta_s
    return response


def write_answer(response: UnaryResponse, answer: Answer) -> UnaryResponse:
    """Put a whole answer into a response that has its ids already."""
    for index, end in sorted(answer.ends.items()):
        response.choices.add(content=_delta(answer.texts[index]), finished=_finished(end))
    response.usage.CopyFrom(_usage(answer.usage))
    if answer.prompt is not None:
        response.prompt_logprobs.CopyFrom(_prompt(answer.prompt))
    return response


def _delta(delta: TextDelta) -> pb.Delta:
    return pb.Delta(
        index=delta.index,
        text=delta.text,
        start_index=delta.start_index,
        token_ids=delta.token_ids,
        logprobs=_tokens(delta.logprobs),
        reasoning=delta.reasoning,
        tool_calls=map(_tool_call, delta.tool_calls) if delta.tool_calls else (),
    )


def _tool_call(call: ToolCallDelta) -> pb.ToolCallDelta:
    return pb.ToolCallDelta(index=call.index, id=call.call_id, name=call.name, arguments_json=call.arguments)


def _finished(end: ChoiceEnd) -> pb.ChoiceFinished:
    receipt = end.receipt
    finished = pb.ChoiceFinished(
        index=end.index,
        finish_reason=_FINISH[end.finish_reason],
        receipt=pb.Receipt(
            queue_seconds=receipt.queue_s,
            cached_tokens=receipt.cached_tokens or 0,
            recomputed_tokens=receipt.recomputed_tokens,
            preemptions=receipt.num_preemptions,
            attempts=receipt.num_attempts,
            replica=receipt.replica,
            numerics=receipt.numerics,
            batch_invariant=receipt.batch_invariant,
            seed=end.seed,
        ),
    )
    if end.stop_string is not None:
        finished.stop_string = end.stop_string
    elif end.stop_token_id is not None:
        finished.stop_token_id = end.stop_token_id
    return finished


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )


def _prompt(prompt: PromptInfo) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(start_index=prompt.start_index, tokens=_tokens(prompt.tokens))


def _tokens(infos: Iterable[TokenInfo]) -> Iterable[pb.TokenLogprob]:
    for info in infos:
        yield pb.TokenLogprob(
            token_id=info.token_id,
            text=info.text,
            raw=info.raw,
            logprob=info.logprob if info.logprob is not None else 0.0,
            top=_tokens(info.top),
        )


def field_of(error: RouterError) -> str | None:
    """The field that an error is about, for google.rpc.BadRequest."""
    return error.field if isinstance(error, InvalidRequest) else None
