"""The part of `octavo ctl` that is about aliases: lists those that operators set, sets them and takes them back."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from octavo.commands.command_line import refuse
from octavo.commands.control import CALL_TIMEOUT_S
from octavo.commands.tables import columns, counted
from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.option_parsing import number
from octavo.options import Limits

_STICKY = {"conversation": pb.STICKINESS_CONVERSATION, "user": pb.STICKINESS_USER}


def add_commands(add: Callable[[str, str, Callable[[Any, argparse.Namespace], int]], argparse.ArgumentParser]) -> None:
    """`add` makes a parser of a command, from its name, its help and what it runs."""
    add("aliases", "List the aliases that were set here, with the models behind them.", _aliases)
    set_alias = add("set-alias", "Let a name stand for models by weight, on every router.", _set_alias)
    set_alias.add_argument("name", metavar="ALIAS", help="What clients write as the model.")
    set_alias.add_argument(
        "weights", nargs="+", type=_weight, metavar="MODEL=WEIGHT", help="A served model and its share, as in big=95."
    )
    set_alias.add_argument(
        "--sticky",
        choices=tuple(_STICKY),
        default="conversation",
        help="What keeps to one model (default: conversation).",
    )
    add("remove-alias", "Take an alias back that was set here.", _remove_alias).add_argument(
        "name", metavar="ALIAS", help="Its name, as `octavo ctl aliases` lists it."
    )


def _weight(text: str) -> tuple[str, float]:
    model, equals, weight = text.rpartition("=")
    if not (model and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not MODEL=WEIGHT, such as big=95")
    return model, number(float, Limits(minimum=0))(weight)


def _aliases(stub: Any, namespace: argparse.Namespace) -> int:
    response = stub.ListAliases(pb.ListAliasesRequest(), timeout=CALL_TIMEOUT_S)
    names = {value: name for name, value in _STICKY.items()}
    rows = [(alias.name, _shares(alias), names.get(alias.sticky, "-")) for alias in response.aliases]
    print("\n".join(columns([("alias", "models", "sticky"), *rows])))
    return 0


def _shares(alias: pb.Alias) -> str:
    return " ".join(f"{model}={weight:g}" for model, weight in sorted(alias.weights.items()))


def _set_alias(stub: Any, namespace: argparse.Namespace) -> int:
    if len(dict(namespace.weights)) < len(namespace.weights):
        refuse("octavo ctl set-alias", ["each model must be named once among the weights"])
    alias = pb.Alias(name=namespace.name, weights=dict(namespace.weights), sticky=_STICKY[namespace.sticky])
    response = stub.SetAlias(pb.SetAliasRequest(alias=alias), timeout=CALL_TIMEOUT_S)
    print(f"{alias.name} stands for {_shares(alias)} on {counted(response.num_routers, 'router')}")
    return 0


def _remove_alias(stub: Any, namespace: argparse.Namespace) -> int:
    response = stub.RemoveAlias(pb.RemoveAliasRequest(name=namespace.name), timeout=CALL_TIMEOUT_S)
    print(f"{namespace.name} is taken back from {counted(response.num_routers, 'router')}")
    return 0
