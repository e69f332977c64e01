"""Asks Octavo over gRPC: InferenceService's Generate or Chat, with the stubs, so that tokens are counted exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from octavo.bench.records import Answer, AskError, BenchRequest
from octavo.bench.sampling import Sampling
from octavo.client.access import with_key
from octavo.client.asking import chat_request, generate_request
from octavo.client.wire import CHANNEL_OPTIONS
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc

_CALL_TIMEOUT_S = 60.0


class GrpcTarget:
    """One channel to one router; create it in a running event loop."""

    def __init__(
        self,
        address: str,
        model: str,
        sampling: Sampling,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._address = address
        self._model = model
        self._sampling = sampling
        if credentials is None:
            self._channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.aio.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._stub: Any = with_key(pb_grpc.InferenceServiceStub(self._channel), api_key)

    @property
    def label(self) -> str:
        return f"grpc://{self._address}"

    async def ask(self, request: BenchRequest, note_tokens: Callable[[int], None]) -> Answer:
        usage: pb.Usage | None = None
        try:
            async for response in self._call(request):
                match response.WhichOneof("event"):
                    case "delta" if response.delta.token_ids:
                        note_tokens(len(response.delta.token_ids))
                    case "usage":
                        usage = response.usage
        except grpc.aio.AioRpcError as error:
            raise _asked(error) from None
        if usage is None:
            raise AskError("cut", "the stream ended without usage")
        return Answer(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)

    async def tokenize(self, text: str) -> list[int]:
        request = pb.TokenizeRequest(model=self._model, text=text, add_special_tokens=False)
        return list((await self._unary(self._stub.Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        request = pb.DetokenizeRequest(model=self._model, token_ids=token_ids)
        return str((await self._unary(self._stub.Detokenize, request)).text)

    async def close(self) -> None:
        await self._channel.close(None)

    def _call(self, request: BenchRequest) -> Any:
        sampling = self._sampling
        options: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "ignore_eos": sampling.ignore_eos,
        }
        if request.priority:
            options["priority"] = request.priority
        if request.cache_salt:
            options["cache_salt"] = request.cache_salt
        if sampling.is_chat:
            messages = [{"role": "user", "content": request.prompt}]
            return self._stub.Chat(chat_request(messages, self._model, options))
        return self._stub.Generate(generate_request(request.prompt, self._model, options))

    async def _unary(self, method: Any, request: Any) -> Any:
        try:
            return await method(request, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _asked(error) from None


def _asked(error: grpc.aio.AioRpcError) -> AskError:
    return AskError(error.code().name, error.details() or "")
