"""The gRPC surface: octavo.v1.InferenceService, health and reflection.

Translates through `grpc_wire`, runs through the front door, and turns its errors into statuses with details
(google.rpc.BadRequest, RetryInfo, RequestInfo). A cancelled call leaves the front door's block, which cancels the work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from octavo.grpc_guard import Context, Handler, readable, refusing
from octavo.grpc_health import Health
from octavo.tracing import HEADER
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from router.access.gate import Gate
from router.access.grpc_gate import GrpcGate
from router.echo import with_prompt
from router.errors import Exhausted, InternalError, InvalidRequest, RouterError, Unimplemented, show_value
from router.front import FrontDoor
from router.grpc_reading import read_chat, read_generate, read_tokenize
from router.grpc_stream import EncodedResponses, MessageResponses, ResponsesFactory
from router.grpc_wire import StreamResponse, UnaryResponse, field_of, write_answer
from router.prepared import Prepared
from router.requests import AnswerBuilder, Event, GenerationRequest, clean_request_id
from router.sending import DEFAULT_TIMEOUT_S, ends_unread
from router.traces import INCOMING

_LOG = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
ACCEPTED_PING_INTERVAL_S = 5
"""Clients may send keepalive pings this often, with or without calls, and are not sent away for it."""

_ID_KEY = "x-request-id"

_LAST_WORD_S = 2.0
"""How long a call that ends with an error waits for its client to take what is before that; it may take nothing."""

_Request = TypeVar("_Request", pb.GenerateRequest, pb.ChatRequest)
_Read: TypeAlias = Callable[[_Request, float | None, str], GenerationRequest]
_Unary = TypeVar("_Unary", bound=UnaryResponse)


def make_server(
    front: FrontDoor, max_message_bytes: int, gate: Gate | None = None, send_timeout_s: float = DEFAULT_TIMEOUT_S
) -> tuple[grpc.aio.Server, Health]:
    """A server with all services, not started, and its health."""
    server = grpc.aio.server(
        interceptors=[GrpcGate(gate or Gate(), abort), _Readable()],
        options=[
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.http2.min_ping_interval_without_data_ms", ACCEPTED_PING_INTERVAL_S * 1000),
            ("grpc.http2.min_recv_ping_interval_without_data_ms", ACCEPTED_PING_INTERVAL_S * 1000),
            ("grpc.http2.max_ping_strikes", 0),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.so_reuseport", 0),
        ],
    )
    servicer = InferenceServicer(front, EncodedResponses, send_timeout_s)
    pb_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    health = Health()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection.enable_server_reflection(
        (SERVICE_NAME, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME), server
    )
    return server, health


def set_health(health: Health, *, serving: bool) -> None:
    """Tell health clients, for the whole server and for the service by name."""
    word = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", SERVICE_NAME):
        health.set(name, word)


class _Readable(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Bytes that are no message are the client's mistake, for every method, and so is a method that there is not;
    streams of answers are bytes already.
    """

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Handler]], details: Any) -> Handler:
        handler = await continuation(details)
        if handler is None:
            return refusing(lambda context: abort(context, _no_method(details.method)))
        if handler.response_streaming and details.method.startswith(f"/{SERVICE_NAME}/"):
            handler = handler._replace(response_serializer=None)
        return readable(handler, self._refuse)

    async def _refuse(self, context: Context) -> None:
        await abort(context, InvalidRequest("request", "request: its bytes are no message of this method"))


def _no_method(name: str) -> Unimplemented:
    methods = ", ".join(method.name for method in pb.DESCRIPTOR.services_by_name["InferenceService"].methods)
    return Unimplemented(
        f"{show_value(name)} is no method of this server; {SERVICE_NAME} has {methods}. The models served here "
        "generate text; for embeddings or rankings ask a server of models that make them"
    )


class InferenceServicer(pb_grpc.InferenceServiceServicer):
    """One method a call; each ends with a status of the closed set."""

    def __init__(
        self,
        front: FrontDoor,
        responses: ResponsesFactory = MessageResponses,
        send_timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """`responses` makes what is written to a stream's context."""
        self._front = front
        self._responses = responses
        self._send_timeout_s = send_timeout_s

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:  # type: ignore[override]
        await self._stream(request, read_generate, pb.GenerateResponse, context)

    async def Chat(self, request: pb.ChatRequest, context: Context) -> None:  # type: ignore[override]
        await self._stream(request, read_chat, pb.ChatResponse, context)

    async def GenerateUnary(self, request: pb.GenerateUnaryRequest, context: Context) -> pb.GenerateUnaryResponse:
        return await self._unary(request.request, read_generate, pb.GenerateUnaryResponse, context)

    async def ChatUnary(self, request: pb.ChatUnaryRequest, context: Context) -> pb.ChatUnaryResponse:
        return await self._unary(request.request, read_chat, pb.ChatUnaryResponse, context)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        models = [
            pb.Model(
                name=model.name,
                max_model_len=model.info.max_model_len,
                vocab_size=model.info.vocab_size,
                ready=model.is_ready,
                weights=model.weights,
            )
            for model in self._front.models()
        ]
        return pb.ListModelsResponse(models=models)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        async with _statuses(context, self._front, _asked_id(context, request.chat)):
            found = await self._front.tokenize(request.model, read_tokenize(request))
            return pb.TokenizeResponse(
                token_ids=found.token_ids, texts=found.token_texts, max_model_len=found.max_model_len
            )
        raise AssertionError("a call ends inside the block")

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with _statuses(context, self._front, _asked_id(context)):
            ids, skips = list(request.token_ids), request.skip_special_tokens
            return pb.DetokenizeResponse(
                text=await self._front.detokenize(request.model, ids, skip_special_tokens=skips)
            )
        raise AssertionError("a call ends inside the block")

    async def _stream(
        self, request: _Request, read: _Read[_Request], response_type: type[StreamResponse], context: Context
    ) -> None:
        request_id, now = _asked_id(context, request), asyncio.get_running_loop().time
        async with _statuses(context, self._front, request_id):
            prepared = await self._prepare(read(request, _deadline_s(context), request_id), context)
            if prepared.params.best_of > prepared.params.n:
                raise InvalidRequest(
                    "best_of",
                    f"best_of {prepared.params.best_of} must equal n in a streaming call: which is best is known at "
                    "the end only; use the unary call",
                )
            responses = self._responses(response_type, prepared)
            async with self._answer(prepared) as events, _until_gone(), ends_unread(self._send_timeout_s) as sending:
                async for event in events:
                    response = responses.of(event)
                    # The streams that one step feeds make all their responses before the first is written: a write
                    # wakes threads and processes, and what they leave of the caches makes the next response dearer.
                    await asyncio.sleep(0)
                    sending.since = now()
                    await context.write(response)
                    sending.since = None

    async def _unary(
        self, request: _Request, read: _Read[_Request], response_type: type[_Unary], context: Context
    ) -> _Unary:
        request_id = _asked_id(context, request)
        async with _statuses(context, self._front, request_id):
            prepared = await self._prepare(read(request, _deadline_s(context), request_id), context)
            builder = AnswerBuilder()
            async with self._answer(prepared) as events:
                async for event in events:
                    builder.add(event)
            response = response_type(request_id=prepared.shown_id, model=prepared.options.model)
            write_answer(response, builder.build())
            return response
        raise AssertionError("a call ends inside the block")

    async def _prepare(self, asked: GenerationRequest, context: Context) -> Prepared:
        INCOMING.set(_metadata(context, HEADER))
        (prepared,) = await self._front.prepare(asked)
        async with _until_gone():
            await context.send_initial_metadata(((_ID_KEY, prepared.shown_id),))
        return prepared

    @contextlib.asynccontextmanager
    async def _answer(self, prepared: Prepared) -> AsyncIterator[AsyncGenerator[Event, None]]:
        async with self._front.answer(prepared) as events:
            if prepared.params.echo:
                async with contextlib.aclosing(with_prompt(events, prepared)) as echoed:
                    yield echoed
            else:
                yield events


@contextlib.asynccontextmanager
async def _until_gone() -> AsyncIterator[None]:
    """gRPC cancels the task of a client that is gone; what is sent to it before that fails, and says no more."""
    try:
        yield
    except grpc.aio.InternalError:
        raise asyncio.CancelledError("the client is gone") from None


def _deadline_s(context: Context) -> float | None:
    """What is left of the client's timeout, up to a hundredth more: gRPC tells three digits of it, rounded up."""
    remaining: float | None = context.time_remaining()
    return remaining


def _metadata(context: Context, name: str) -> str:
    """The first value of that key; empty where there is none."""
    metadata: Any = context.invocation_metadata() or ()
    found = [value for key, value in metadata if key == name and isinstance(value, str)]
    return found[0] if found else ""


def _asked_id(context: Context, request: pb.GenerateRequest | pb.ChatRequest | None = None) -> str:
    """What the client calls a request, in its options or else in the call's metadata; empty for nothing to show."""
    said = "" if request is None else clean_request_id(request.options.request_id)
    return said or clean_request_id(_metadata(context, _ID_KEY))


@contextlib.asynccontextmanager
async def _statuses(context: Context, front: FrontDoor, request_id: str) -> AsyncIterator[None]:
    """End the call with the status of whatever is raised inside."""
    try:
        yield
    except RouterError as error:
        front.refused(error, request_id)
        await _end(context, error, request_id)
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception:
        request_id = request_id or secrets.token_hex(12)
        defect = InternalError(f"internal error; request id {request_id}")
        _LOG.exception("gRPC: %s", defect.message)
        front.metrics.refused(defect)
        await _end(context, defect, request_id)


async def abort(context: Context, error: RouterError) -> None:
    """End a call whose request has not been read with the error's status and details."""
    await _end(context, error, _asked_id(context))


async def _end(context: Context, error: RouterError, request_id: str) -> None:
    codes = error.codes
    status = status_pb2.Status(code=codes.grpc_code, message=error.message)
    field = field_of(error)
    if field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=error.message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, Exhausted):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    metadata: list[tuple[str, str | bytes]] = []
    if request_id:
        status.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
        metadata.append((_ID_KEY, request_id))
    metadata.append(("grpc-status-details-bin", status.SerializeToString()))
    try:
        async with _until_gone(), asyncio.timeout(_LAST_WORD_S):
            await context.abort(getattr(grpc.StatusCode, codes.grpc_status), error.message, tuple(metadata))
    except TimeoutError:  # gRPC sends it once the client has taken what is before it, if ever
        raise asyncio.CancelledError("the client takes nothing") from None
