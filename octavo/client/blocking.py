"""The client for threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self, Unpack, overload

import grpc
import grpc.experimental

from octavo.client.access import Tls, choose_credentials, with_key
from octavo.client.asking import Message, chat_request, generate_request, tokenize_request
from octavo.client.errors import from_rpc_error
from octavo.client.types import ChatOptions, Delta, GenerateOptions, Model, Result, Tokens
from octavo.client.wire import CHANNEL_OPTIONS, ResultBuilder, read_models, read_result, read_tokens
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc

DEFAULT_ADDRESS = "127.0.0.1:8001"

# The thread that iterates a stream waits for its messages itself: handed over by a thread of the channel's, each would
# come half a millisecond later.
_CHANNEL_OPTIONS = [*CHANNEL_OPTIONS, (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1)]


class DeltaStream:
    """The deltas of a streamed answer; iterate once. Leaving the loop or the `with` block early cancels the work."""

    def __init__(self, call: Any, channel: grpc.Channel) -> None:
        """`channel` is the call's, kept open for as long as this: a call that one thread serves does not keep it."""
        self._call = call
        self._channel = channel
        self._builder = ResultBuilder()

    def __iter__(self) -> Iterator[Delta]:
        try:
            for response in self._call:
                event = self._builder.add(response)
                if isinstance(event, Delta):
                    yield event
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
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


class Client:
    """Talks to one router. Safe to use from several threads; close it, or use it in a `with` block."""

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
            self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
        self._stub: Any = with_key(pb_grpc.InferenceServiceStub(self._channel), api_key)

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[False] = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: Literal[True],
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> DeltaStream: ...

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result | DeltaStream:
        """Continue a prompt given as text or token ids. Raises OctavoError; a stream raises it while iterated."""
        request = generate_request(prompt, self.model, options)
        if stream:
            return DeltaStream(self._stub.Generate(request, timeout=timeout_s), self._channel)
        unary = pb.GenerateUnaryRequest(request=request)
        return read_result(_call(self._stub.GenerateUnary, unary, timeout_s))

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: Literal[False] = False,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result: ...

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: Literal[True],
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> DeltaStream: ...

    def chat(
        self,
        messages: Sequence[Message],
        *,
        stream: bool = False,
        timeout_s: float | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result | DeltaStream:
        """Answer a conversation: mappings of role and content. Raises OctavoError as `generate` does."""
        request = chat_request(messages, self.model, options)
        if stream:
            return DeltaStream(self._stub.Chat(request, timeout=timeout_s), self._channel)
        return read_result(_call(self._stub.ChatUnary, pb.ChatUnaryRequest(request=request), timeout_s))

    def tokenize(
        self, prompt: str | Sequence[Message], *, timeout_s: float | None = None, **options: Unpack[ChatOptions]
    ) -> Tokens:
        """The tokens of text, or of a conversation as `chat` would run it. Text takes `add_special_tokens` alone."""
        request = tokenize_request(prompt, self.model, options)
        return read_tokens(_call(self._stub.Tokenize, request, timeout_s))

    def detokenize(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, timeout_s: float | None = None
    ) -> str:
        """The text of token ids."""
        request = pb.DetokenizeRequest(model=self.model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        text: str = _call(self._stub.Detokenize, request, timeout_s).text
        return text

    def models(self, *, timeout_s: float | None = None) -> list[Model]:
        """What the router serves now."""
        return read_models(_call(self._stub.ListModels, pb.ListModelsRequest(), timeout_s))

    def close(self) -> None:
        """Close the channel; calls that still run end as cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _call(method: Any, request: Any, timeout_s: float | None) -> Any:
    try:
        return method(request, timeout=timeout_s)
    except grpc.RpcError as error:
        raise from_rpc_error(error) from None
