"""The client for asyncio."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import grpc.aio

from octavo.client.access import Tls, choose_credentials, with_key
from octavo.client.asking import Message, chat_request, generate_request, tokenize_request
from octavo.client.blocking import DEFAULT_ADDRESS
from octavo.client.errors import from_rpc_error
from octavo.client.types import ChatOptions, Delta, GenerateOptions, Model, Result, Tokens
from octavo.client.wire import CHANNEL_OPTIONS, ResultBuilder, read_models, read_result, read_tokens
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc


class AsyncDeltaStream:
    """The deltas of a streamed answer; iterate once. Leaving the `async with` block early cancels the work."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._builder = ResultBuilder()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        try:
            async for response in self._call:
                event = self._builder.add(response)
                if isinstance(event, Delta):
                    yield event
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        finally:
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Stop the work. Does nothing to a stream that has ended."""
        self._call.cancel()

    @property
    def result(self) -> Result:
        """Everything put together, once the deltas have been read to the end. Raises ValueError before that."""
        return self._builder.build()


class AsyncClient:
    """Talks to one router. Create it in a running event loop; close it, or use it in an `async with` block."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str = "",
        api_key: str | None = None,
        tls: Tls | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        """`address` is host:port of a router's gRPC port. `model` is named in requests; empty: the router's own.

        `api_key` is taken from OCTAVO_API_KEY when left out. `tls`, or gRPC's own `credentials`, encrypt the channel.
        Raises ValueError for what cannot be used.
        """
        self.address = address
        self.model = model
        credentials = choose_credentials(tls, credentials)
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub: Any = with_key(pb_grpc.InferenceServiceStub(self._channel), api_key)

    @overload
    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[False] = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result: ...

    @overload
    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[True],
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncDeltaStream: ...

    async def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result | AsyncDeltaStream:
        """Continue a prompt given as text or token ids. Raises OctavoError; a stream raises it while iterated."""
        request = generate_request(prompt, self.model, options)
        if stream:
            return AsyncDeltaStream(self._stub.Generate(request, timeout=timeout_s))
        unary = pb.GenerateUnaryRequest(request=request)
        return read_result(await _call(self._stub.GenerateUnary, unary, timeout_s))

    @overload
    async def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: Literal[False] = False,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result: ...

    @overload
    async def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: Literal[True],
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> AsyncDeltaStream: ...

    async def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result | AsyncDeltaStream:
        """Answer a conversation: mappings of role and content. Raises OctavoError as `generate` does."""
        request = chat_request(messages, self.model, options)
        if stream:
            return AsyncDeltaStream(self._stub.Chat(request, timeout=timeout_s))
        return read_result(await _call(self._stub.ChatUnary, pb.ChatUnaryRequest(request=request), timeout_s))

    async def tokenize(
        self, prompt: str | Sequence[Message], *, timeout_s: float | None = None, **options: Unpack[ChatOptions]
    ) -> Tokens:
        """The tokens of text, or of a conversation as `chat` would run it. Text takes `add_special_tokens` alone."""
        request = tokenize_request(prompt, self.model, options)
        return read_tokens(await _call(self._stub.Tokenize, request, timeout_s))

    async def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float | None = None
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(model=self.model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        text: str = (await _call(self._stub.Detokenize, request, timeout_s)).text
        return text

    async def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """What the router serves now."""
        return read_models(await _call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s))

    async def close(self) -> None:
        """Close the channel; calls that still run end as cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _call(method: Any, request: Any, timeout_s: float | None) -> Any:
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from None
