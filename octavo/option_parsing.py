"""Options on a command line: what argparse is told of the fields of a config class, and of a command's own numbers.

Whatever a value breaks is said in one line, and ends the command with status 2.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from octavo.integers import INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN
from octavo.options import Limits, Option, OptionError, check_value, options_of
from octavo.sizes import parse_bytes

Number = TypeVar("Number", int, float)

INT32 = Limits(INT32_MIN, INT32_MAX)
INT64 = Limits(INT64_MIN, INT64_MAX)
POSITIVE_INT32 = Limits(1, INT32_MAX)


def add_options(
    parser: argparse._ActionsContainer, config_class: type, *, without: Iterable[str] = ()
) -> tuple[str, ...]:
    """Add the options of a config class to a parser or a group of one; returns the field names added.

    `without` leaves fields out: what a supervisor decides itself, or what another config class already added.
    Nothing is stored for an option that was not given, so the namespace tells given from default.
    """
    skipped = frozenset(without)
    added = [entry for entry in options_of(config_class) if entry.name not in skipped]
    for entry in added:
        _add_option(parser, entry)
    return tuple(entry.name for entry in added)


def number(kind: type[Number], limits: Limits | None = None) -> Callable[[str], Number]:
    """A `type` for argparse: a whole number or a finite one, inside the limits."""

    def parse(text: str) -> Number:
        value = _read_number(kind, text)
        if limits is not None and not limits.hold(value):
            raise argparse.ArgumentTypeError(f"{text}: {limits}")
        return value

    return parse


def _add_option(parser: argparse._ActionsContainer, entry: Option) -> None:
    text = entry.info.help.replace("%", "%%")
    if entry.info.kind == "positional":
        parser.add_argument(entry.name, nargs="?", default=argparse.SUPPRESS, metavar=entry.label, help=text)
        return
    if entry.default not in (None, "") and entry.info.kind != "repeated":
        text += f" (default: {entry.show(entry.default)})"
    settings: dict[str, Any] = {"dest": entry.name, "default": argparse.SUPPRESS, "help": text}
    if entry.type is bool:
        parser.add_argument(entry.flag, action=argparse.BooleanOptionalAction, **settings)
        return
    if entry.info.kind == "repeated":
        parser.add_argument(entry.flag, action="append", metavar="NAME=VALUE", **settings)
        return
    settings["type"] = _parser_of(entry)
    if entry.info.choices:
        settings["metavar"] = "{" + ",".join(entry.info.choices) + "}"
    else:
        settings["metavar"] = {"bytes": "SIZE", "seconds": "SECONDS"}.get(entry.info.kind) or {
            int: "N",
            float: "X",
        }.get(entry.type, "TEXT")
    parser.add_argument(entry.flag, **settings)


def _parser_of(entry: Option) -> Callable[[str], object]:
    def parse(text: str) -> object:
        value = _read_value(entry, text)
        try:
            check_value(entry, value)
        except OptionError as error:
            raise argparse.ArgumentTypeError(f"{error.value}: {error.limit}. {error.remedy}") from None
        return value

    return parse


def _read_value(entry: Option, text: str) -> object:
    if entry.info.kind == "bytes":
        try:
            return parse_bytes(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return _read_number(entry.type, text) if entry.type in (int, float) else text


def _read_number(kind: type[Number], text: str) -> Number:
    expected = {int: "a whole number", float: "a number"}[kind]
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}")
    return value
