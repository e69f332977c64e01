"""How operators' commands reach a running scheduler: the options that name it, a channel, and what a failure means.

Knows the wire; knows no command.
"""

from __future__ import annotations

import argparse
from typing import Any

import grpc

from octavo import common_options
from octavo.addresses import UNIX_PREFIX
from octavo.internal.v1 import scheduler_pb2_grpc as pb_grpc
from octavo.options import OptionError
from octavo.process import StartError
from octavo.tls import internal_channel_credentials

DEFAULT_ADDRESS = "127.0.0.1:8002"
CALL_TIMEOUT_S = 10.0
"""What a call that is no stream may take."""


def add_address(parser: argparse.ArgumentParser, *, again: bool = False) -> None:
    """The options that say which scheduler, and what to show it.

    `again` is for a subcommand of a parser that has them: given there they count, left out they change nothing.
    """
    parser.add_argument(
        "--scheduler-address",
        default=argparse.SUPPRESS if again else DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"Address of the scheduler; `octavo serve` prints it (default: {DEFAULT_ADDRESS}).",
    )
    for name, help in (
        ("cert", "PEM certificate chain to show the scheduler, where it asks for one."),
        ("key", "PEM private key of --internal-tls-cert."),
        ("ca", "PEM certificates of the CA that the scheduler's certificate comes from."),
    ):
        default = argparse.SUPPRESS if again else None
        parser.add_argument(f"--internal-tls-{name}", metavar="FILE", default=default, help=help)


def connect(namespace: argparse.Namespace) -> tuple[grpc.Channel, Any]:
    """A channel to the scheduler that the options of `add_address` name, and the stub of its ControlService.

    Raises StartError for what is no address and for certificates that cannot be used.
    """
    _check_address(namespace.scheduler_address)
    try:
        given = {name: getattr(namespace, f"internal_tls_{name}") for name in ("cert", "key", "ca")}
        common_options.check_mutual_options("--internal-tls", **given)
    except OptionError as error:
        raise StartError(str(error)) from None
    credentials = internal_channel_credentials(**given)
    options = (("grpc.max_receive_message_length", -1),)
    if credentials is None:
        channel = grpc.insecure_channel(namespace.scheduler_address, options=options)
    else:
        channel = grpc.secure_channel(namespace.scheduler_address, credentials, options=options)
    return channel, pb_grpc.ControlServiceStub(channel)


def _check_address(address: str) -> None:
    if address.startswith(UNIX_PREFIX):
        return
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal() and 1 <= int(port) <= 65535):
        raise StartError(
            f"--scheduler-address {address}: it is neither HOST:PORT with a port from 1 to 65535 nor unix:PATH. "
            f"Use {DEFAULT_ADDRESS}, or what `octavo serve` printed"
        )


def explain_failure(address: str, error: grpc.RpcError) -> StartError:
    """What a failed call means for whoever typed the command."""
    code, details = error.code(), error.details()
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return StartError(f"no scheduler answers at {address} ({details}); name another with --scheduler-address")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return StartError(f"what answers at {address} is no scheduler of this version ({details})")
    return StartError(str(details))
