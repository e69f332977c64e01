"""The client's exceptions, one a kind of failure, from gRPC statuses with google.rpc details.

The few google.rpc messages needed are declared here in a descriptor pool of their own, so that the client needs no
package for them and gets along with one that is there.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError


class OctavoError(Exception):
    """Base of all. `field` is the offending field, where there is one; `retry_after_s` when trying again may help."""

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None, request_id: str = ""
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s
        self.request_id = request_id


class InvalidArgument(OctavoError):
    """The request breaks a rule; the message names field, value and limit."""


class Unauthenticated(OctavoError):
    """No key, or one that is not known."""


class PermissionDenied(OctavoError):
    """Whoever asks may not: the address is not let in, or the key is not good for this."""


class NotFound(OctavoError):
    """No such model."""


class Exhausted(OctavoError):
    """Too large, or a queue is full: try again after `retry_after_s`."""


class Unavailable(OctavoError):
    """No server there, or none that can produce a token now."""


class DeadlineExceeded(OctavoError):
    """The request's time limit has passed."""


class Cancelled(OctavoError):
    """The call was cancelled."""


class ServerError(OctavoError):
    """The server failed."""


_CLASSES: dict[grpc.StatusCode, type[OctavoError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Exhausted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def from_rpc_error(error: Any) -> OctavoError:
    """The exception for a gRPC error of either API."""
    error_class = _CLASSES.get(error.code(), ServerError)
    field, retry_after_s, request_id = _read_details(error.trailing_metadata() or ())
    return error_class(error.details() or "", field=field, retry_after_s=retry_after_s, request_id=request_id)


def _read_details(metadata: Any) -> tuple[str | None, float | None, str]:
    """(field, retry delay in seconds, request id) of the status details, where they hold such."""
    field, retry_after_s, request_id = None, None, ""
    for key, value in metadata:
        if key != "grpc-status-details-bin":
            continue
        try:
            for detail in _MESSAGES["Status"].FromString(value).details:
                match detail.type_url.rpartition("/")[2]:
                    case "google.rpc.BadRequest":
                        violations = _MESSAGES["BadRequest"].FromString(detail.value).field_violations
                        field = violations[0].field if violations else None
                    case "google.rpc.RetryInfo":
                        delay = _MESSAGES["RetryInfo"].FromString(detail.value).retry_delay
                        retry_after_s = delay.seconds + delay.nanos * 1e-9
                    case "google.rpc.RequestInfo":
                        request_id = _MESSAGES["RequestInfo"].FromString(detail.value).request_id
        except DecodeError:
            return None, None, ""
    return field, retry_after_s, request_id


_STRING, _BYTES, _INT32, _INT64, _MESSAGE = 9, 12, 5, 3, 11
_REPEATED, _OPTIONAL = 3, 1
_LAYOUT: dict[str, list[tuple[str, int, int, bool, str]]] = {
    # message: (field, number, type, repeated, message type)
    "Any": [("type_url", 1, _STRING, False, ""), ("value", 2, _BYTES, False, "")],
    "Status": [("details", 3, _MESSAGE, True, "Any")],
    "FieldViolation": [("field", 1, _STRING, False, "")],
    "BadRequest": [("field_violations", 1, _MESSAGE, True, "FieldViolation")],
    "Duration": [("seconds", 1, _INT64, False, ""), ("nanos", 2, _INT32, False, "")],
    "RetryInfo": [("retry_delay", 1, _MESSAGE, False, "Duration")],
    "RequestInfo": [("request_id", 1, _STRING, False, "")],
}


def _make_messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(
        name="octavo/client/details.proto", package="octavo.details", syntax="proto3"
    )
    for name, fields in _LAYOUT.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated, type_name in fields:
            message.field.add(
                name=field,
                number=number,
                type=kind,
                label=_REPEATED if repeated else _OPTIONAL,
                type_name=f".octavo.details.{type_name}" if type_name else None,
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"octavo.details.{name}") for name in _LAYOUT}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in found.items()}


_MESSAGES = _make_messages()
