"""The Python client: `Client` for threads, `AsyncClient` for asyncio, over gRPC.

Needs grpcio and protobuf alone. What it returns and raises are plain frozen dataclasses and named exceptions.
"""

from octavo.client.access import Tls
from octavo.client.aio import AsyncClient, AsyncDeltaStream
from octavo.client.blocking import Client, DeltaStream
from octavo.client.errors import (
    Cancelled,
    DeadlineExceeded,
    Exhausted,
    InvalidArgument,
    NotFound,
    OctavoError,
    PermissionDenied,
    ServerError,
    Unauthenticated,
    Unavailable,
)
from octavo.client.types import (
    ChatOptions,
    Choice,
    Delta,
    GenerateOptions,
    Model,
    Options,
    QueuePosition,
    Receipt,
    Result,
    TokenLogprob,
    Tokens,
    ToolCall,
    Usage,
)

__all__ = [
    "AsyncClient",
    "AsyncDeltaStream",
    "Cancelled",
    "ChatOptions",
    "Choice",
    "Client",
    "DeadlineExceeded",
    "Delta",
    "DeltaStream",
    "Exhausted",
    "GenerateOptions",
    "InvalidArgument",
    "Model",
    "NotFound",
    "OctavoError",
    "Options",
    "PermissionDenied",
    "QueuePosition",
    "Receipt",
    "Result",
    "ServerError",
    "Tls",
    "TokenLogprob",
    "Tokens",
    "ToolCall",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
