"""Between octavo.v1's messages and the shapes of `router.requests`; nothing else reads or builds these messages.

A field that a client left unset stays unset, so that the rules of `router.sampling` see what was said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from octavo.v1 import inference_pb2 as pb
from router.errors import InvalidRequest, RouterError
from router.requests import (
    Answer,
    ChatPrompt,
    ChoiceEnd,
    CompletionPrompt,
    Event,
    GenerationRequest,
    PromptInfo,
    QueueInfo,
    RequestOptions,
    TextDelta,
    TokenInfo,
    Usage,
)
from router.sampling import SamplingRequest
from router.structured.message import read_structured_output
from router.text.prompt import ChatOptions

StreamResponse: TypeAlias = pb.GenerateResponse | pb.ChatResponse
UnaryResponse: TypeAlias = pb.GenerateUnaryResponse | pb.ChatUnaryResponse

_PLAIN_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "n",
)
_FINISH = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


def read_generate(request: pb.GenerateRequest, deadline_s: float | None, request_id: str) -> GenerationRequest:
    """A Generate request. Raises InvalidRequest for what is not supported."""
    _refuse_resume(request.resume)
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("prompt", "prompt: one of text and token_ids must be set")
    value: object = request.text if kind == "text" else list(request.token_ids.ids)
    return GenerationRequest(
        CompletionPrompt(value),
        _sampling(request),
        _options(request, deadline_s, request_id),
        read_structured_output(request.sampling),
    )


def read_chat(request: pb.ChatRequest, deadline_s: float | None, request_id: str) -> GenerationRequest:
    """A Chat request. Raises InvalidRequest for what is not supported."""
    _refuse_resume(request.resume)
    opens = request.add_generation_prompt if request.HasField("add_generation_prompt") else None
    options = ChatOptions(add_generation_prompt=opens, continue_final_message=request.continue_final_message)
    messages = [_message(message) for message in request.messages]
    return GenerationRequest(
        ChatPrompt(messages, options),
        _sampling(request),
        _options(request, deadline_s, request_id),
        read_structured_output(request.sampling),
    )


def _message(message: pb.ChatMessage) -> Mapping[str, str]:
    named = {"name": message.name} if message.name else {}
    return {"role": message.role, "content": message.content, **named}


def _refuse_resume(resume: bytes) -> None:
    if resume:
        raise InvalidRequest("resume", "resume: this server does not continue answers of other routers; leave it empty")


def _sampling(request: pb.GenerateRequest | pb.ChatRequest) -> SamplingRequest:
    asked, output = request.sampling, request.output
    said: dict[str, Any] = {name: getattr(asked, name) for name in _PLAIN_FIELDS if asked.HasField(name)}  # type: ignore[arg-type]
    return SamplingRequest(
        **said,
        logit_bias=dict(asked.logit_bias) or None,
        stop=list(asked.stop) or None,
        stop_token_ids=list(asked.stop_token_ids) or None,
        ignore_eos=asked.ignore_eos,
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        skip_special_tokens=not output.include_special_tokens,
    )


def _options(request: pb.GenerateRequest | pb.ChatRequest, deadline_s: float | None, request_id: str) -> RequestOptions:
    options = request.options
    return RequestOptions(
        model=request.model,
        request_id=options.request_id or request_id,
        priority=options.priority,
        cache_salt=options.cache_salt,
        adapter=options.adapter,
        queue_events=options.queue_events,
        deadline_s=deadline_s,
    )


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
    )


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
