"""What can go wrong with a request, as a closed set, and how each surface says it.

The router raises these and nothing else on purpose; the surfaces look codes up in `WIRE_CODES` and never invent their
own. Knows no gRPC and no HTTP library: status names and numbers only. Messages may hold a client's own values, so
they go back to that client and are never logged at the default level.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, unique
from types import MappingProxyType
from typing import ClassVar

MAX_SHOWN_VALUE_CHARS = 80
"""Longest piece of a refused value that a message repeats."""


@unique
class ErrorKind(Enum):
    """Every kind of failure a client can see."""

    INVALID_ARGUMENT = "invalid_argument"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    TOO_LATE = "too_late"
    TOO_LARGE = "too_large"
    EXHAUSTED = "exhausted"
    CANCELLED = "cancelled"
    UNIMPLEMENTED = "unimplemented"
    UNAVAILABLE = "unavailable"
    DEADLINE = "deadline"
    INTERNAL = "internal"


@dataclass(frozen=True)
class WireCodes:
    """One row of the table: the HTTP status, the gRPC status (name and number), and the `type` of OpenAI's error
    body.
    """

    http_status: int
    grpc_status: str
    grpc_code: int
    openai_type: str


WIRE_CODES: Mapping[ErrorKind, WireCodes] = MappingProxyType(
    {
        ErrorKind.INVALID_ARGUMENT: WireCodes(400, "INVALID_ARGUMENT", 3, "invalid_request_error"),
        ErrorKind.UNAUTHENTICATED: WireCodes(401, "UNAUTHENTICATED", 16, "authentication_error"),
        ErrorKind.FORBIDDEN: WireCodes(403, "PERMISSION_DENIED", 7, "permission_error"),
        ErrorKind.NOT_FOUND: WireCodes(404, "NOT_FOUND", 5, "not_found_error"),
        ErrorKind.TOO_LATE: WireCodes(408, "DEADLINE_EXCEEDED", 4, "timeout_error"),
        ErrorKind.TOO_LARGE: WireCodes(413, "RESOURCE_EXHAUSTED", 8, "request_too_large"),
        ErrorKind.EXHAUSTED: WireCodes(429, "RESOURCE_EXHAUSTED", 8, "rate_limit_error"),
        ErrorKind.CANCELLED: WireCodes(499, "CANCELLED", 1, "cancelled"),
        ErrorKind.UNIMPLEMENTED: WireCodes(501, "UNIMPLEMENTED", 12, "invalid_request_error"),
        ErrorKind.UNAVAILABLE: WireCodes(503, "UNAVAILABLE", 14, "unavailable_error"),
        ErrorKind.DEADLINE: WireCodes(504, "DEADLINE_EXCEEDED", 4, "timeout_error"),
        ErrorKind.INTERNAL: WireCodes(500, "INTERNAL", 13, "internal_error"),
    }
)


class RouterError(Exception):
    """Base of the closed set. `message` is fit for the client; `codes` says how to send it."""

    kind: ClassVar[ErrorKind] = ErrorKind.INTERNAL

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.has_run = False
        """Whether it ended a request that ran, whose end has a line in the log of its own."""

    @property
    def codes(self) -> WireCodes:
        return WIRE_CODES[self.kind]


class InvalidRequest(RouterError):
    """A parameter breaks a rule. `field` is its path as the client wrote it, e.g. `messages[2].content`."""

    kind = ErrorKind.INVALID_ARGUMENT

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message if message.startswith(field) else f"{field}: {message}")
        self.field = field


class RequestTooLarge(InvalidRequest):
    """A body or text over a size limit, refused before it is read or tokenized in full."""

    kind = ErrorKind.TOO_LARGE


class TooLate(RouterError):
    """The body of a request did not come in time."""

    kind = ErrorKind.TOO_LATE


class Unauthenticated(RouterError):
    """No key, or one that is not known."""

    kind = ErrorKind.UNAUTHENTICATED


class Forbidden(RouterError):
    """Whoever asks may not come in, whatever is asked."""

    kind = ErrorKind.FORBIDDEN


class NotFound(InvalidRequest):
    """The model, adapter or object named by `field` does not exist here."""

    kind = ErrorKind.NOT_FOUND


class Exhausted(RouterError):
    """A queue or rate limit is full; trying again after `retry_after_s` seconds may succeed."""

    kind = ErrorKind.EXHAUSTED

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Cancelled(RouterError):
    """The client is gone or takes nothing of its answer, or an operator has ended the request."""

    kind = ErrorKind.CANCELLED


class Unimplemented(RouterError):
    """A method that there is not."""

    kind = ErrorKind.UNIMPLEMENTED


class Unavailable(RouterError):
    """Nothing can produce a token now: starting, draining, or no replica in reach."""

    kind = ErrorKind.UNAVAILABLE


class DeadlineExceeded(RouterError):
    """The request's own time limit has passed."""

    kind = ErrorKind.DEADLINE


class InternalError(RouterError):
    """Our fault. The message carries no internals; the surface adds the request id."""

    kind = ErrorKind.INTERNAL


def show_value(value: object) -> str:
    """`repr` of a refused value, printable and short enough for a message.

    A container is named by its length alone: formatting a huge one would cost more than refusing it.
    """
    if isinstance(value, (list, tuple, dict, set)):
        return f"a {type(value).__name__} of {len(value)} items"
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (str, bytes)) and len(value) > MAX_SHOWN_VALUE_CHARS:
        return f"{value[:MAX_SHOWN_VALUE_CHARS]!a}… ({len(value)} long)"
    return ascii(value)[: 2 * MAX_SHOWN_VALUE_CHARS]


def check_text(field: str, value: object) -> str:
    """`value` if it is text that UTF-8 can carry. NUL is legal; a lone surrogate is refused with its index."""
    if not isinstance(value, str):
        raise InvalidRequest(field, f"{field} must be a string, got {show_value(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            field,
            f"{field} holds a lone surrogate {value[error.start]!a} at character {error.start}; "
            "text must be valid Unicode",
        ) from None
    return value
