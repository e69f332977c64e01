"""Options: one frozen dataclass per process is the single source of its options.

A field made by `option` or `argument` carries its help, limits and spelling; the command line, the values
printed at start, and the arguments handed to a child process are all derived from it. Knows dataclasses;
`option_parsing` knows argparse. Must not know which processes exist.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from octavo.sizes import format_bytes

T = TypeVar("T")
Kind = Literal["plain", "bytes", "seconds", "secret", "positional", "repeated"]

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
"""The model served when none is named; `octavo.sources` resolves it to files."""

LOG_LEVELS = ("debug", "info", "warning", "error")

_METADATA_KEY = "octavo.option"


class OptionError(ValueError):
    """A value an option cannot take: names the option, the value, the limit and what to do."""

    def __init__(self, flag: str, value: object, limit: str, remedy: str) -> None:
        super().__init__(f"{flag} {value}: {limit}. {remedy}")
        self.flag = flag
        self.value = value
        self.limit = limit
        self.remedy = remedy


@dataclass(frozen=True)
class Limits:
    """The range of a number; None leaves that side open. `above` is a lower bound that is not in the range itself."""

    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None

    def __str__(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f"must be between {_plain(self.minimum)} and {_plain(self.maximum)}"
        bounds = (("above", self.above), ("at least", self.minimum), ("at most", self.maximum))
        return "must be " + " and ".join(f"{what} {_plain(bound)}" for what, bound in bounds if bound is not None)

    def hold(self, value: float) -> bool:
        above = (self.minimum is None or value >= self.minimum) and (self.above is None or value > self.above)
        return above and (self.maximum is None or value <= self.maximum)


@dataclass(frozen=True)
class OptionInfo:
    """What the command line needs to know of a field beyond its name, type and default."""

    help: str
    flag: str | None
    choices: tuple[str, ...]
    limits: Limits | None
    kind: Kind


@dataclass(frozen=True)
class Option:
    """One option of a config class: field name, flag, value type, default, and what `option` was told."""

    name: str
    flag: str
    type: type
    optional: bool
    default: Any
    info: OptionInfo

    @property
    def label(self) -> str:
        """How messages call it: the flag, or MODEL for a positional argument."""
        return self.name.upper() if self.info.kind == "positional" else self.flag

    @property
    def variable(self) -> str:
        """The environment variable that a secret is read from: OCTAVO_API_KEY for `api_key`."""
        return f"OCTAVO_{self.name.upper()}"

    def show(self, value: object) -> str:
        """The value as people read it: sizes with their unit, None as `unset`, booleans as on and off."""
        if value is None:
            return "unset"
        if self.info.kind == "secret":
            return "set"
        if isinstance(value, bool):
            return "on" if value else "off"
        if isinstance(value, tuple):
            return ", ".join(value) or "none"
        if self.info.kind == "bytes" and isinstance(value, int):
            return format_bytes(value)
        if self.info.kind == "seconds":
            return f"{value:g} s"
        return str(value)


def option(
    default: T,
    help: str,
    *,
    flag: str | None = None,
    choices: Sequence[str] = (),
    limits: Limits | None = None,
    kind: Kind = "plain",
) -> T:
    """A dataclass field that is an option.

    `flag` replaces the spelling derived from the field name (`max_num_seqs` is `--max-num-seqs`). `kind` is
    "bytes" for sizes such as 2GiB, "seconds" for durations, "secret" for what is read from an environment variable
    too, never shown, and never put on a command line, "repeated" for a tuple of texts, each given by the flag once
    more. Booleans become `--x` and `--no-x`. Returns a
    dataclass field, typed as its value so that type checkers see the annotation.
    """
    info = OptionInfo(help, flag, tuple(choices), limits, kind)
    return dataclasses.field(default=default, metadata={_METADATA_KEY: info}, repr=kind != "secret")


def argument(default: T, help: str) -> T:
    """A dataclass field that is a positional argument which may be left out, such as [MODEL]."""
    info = OptionInfo(help, None, (), None, "positional")
    return dataclasses.field(default=default, metadata={_METADATA_KEY: info})


def options_of(config_class: type) -> tuple[Option, ...]:
    """Every option of a config class: its own in their order, then those of the classes that it is made of."""
    hints = typing.get_type_hints(config_class)
    found = []
    own = inspect.get_annotations(config_class)
    for field in sorted(dataclasses.fields(config_class), key=lambda field: field.name not in own):
        info = field.metadata.get(_METADATA_KEY)
        if info is None:
            continue
        value_type, optional = _value_type(hints[field.name])
        flag = info.flag or "--" + field.name.replace("_", "-")
        found.append(Option(field.name, flag, value_type, optional, field.default, info))
    return tuple(found)


def given_options(config_class: type, namespace: argparse.Namespace) -> dict[str, Any]:
    """The options of the class that were given on the command line, by field name."""
    values = vars(namespace)
    given = {entry.name: values[entry.name] for entry in options_of(config_class) if entry.name in values}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def from_args(config_class: type[T], namespace: argparse.Namespace, **overrides: object) -> T:
    """Build the config from parsed arguments, and its secrets from the environment where they were not given.

    `overrides` are fields the caller decides. Raises OptionError for a value outside its limits.
    """
    secrets = {
        entry.name: os.environ[entry.variable] for entry in secrets_of(config_class) if os.environ.get(entry.variable)
    }
    return config_class(**{**secrets, **given_options(config_class, namespace), **overrides})


def secret_environment(config: Any) -> dict[str, str]:
    """The environment that hands the config's secrets to a child process."""
    values = {entry.variable: getattr(config, entry.name) for entry in secrets_of(type(config))}
    return {variable: value for variable, value in values.items() if value is not None}


def secrets_of(config_class: type) -> tuple[Option, ...]:
    """The options of a config class that are secrets."""
    return tuple(entry for entry in options_of(config_class) if entry.info.kind == "secret")


def check_values(config: Any) -> None:
    """Raise OptionError for the first value outside its choices or limits; called from `__post_init__`."""
    for entry in options_of(type(config)):
        value = getattr(config, entry.name)
        if value is None and entry.optional:
            continue
        check_value(entry, value)


def differences(config: Any) -> list[str]:
    """One line for each value that differs from its default: `--max-num-seqs 8 (default 64)`."""
    return [
        f"{entry.label} {entry.show(getattr(config, entry.name))} (default {entry.show(entry.default)})"
        for entry in options_of(type(config))
        if getattr(config, entry.name) != entry.default
    ]


def to_arguments(config: Any) -> list[str]:
    """The command line that makes this config again, naming only what differs from the defaults, and no secret."""
    words: list[str] = []
    positional: list[str] = []
    for entry in options_of(type(config)):
        value = getattr(config, entry.name)
        if value == entry.default or entry.info.kind == "secret":
            continue
        if value is None:
            raise OptionError(entry.label, "unset", "its default is not unset", "Give it a value")
        if entry.info.kind == "positional":
            positional.append(str(value))
        elif entry.type is bool:
            words.append(entry.flag if value else _negation(entry.flag))
        elif entry.info.kind == "repeated":
            words += [f"{entry.flag}={one}" for one in value]
        else:
            words.append(f"{entry.flag}={value}")
    # Behind `--` a value that begins with a dash is still a value.
    return [*words, "--", *positional] if positional else words


def flags_of(config_class: type) -> Mapping[str, Option]:
    """Every spelling of every option of the class, the negations of booleans included."""
    return dict(_spellings(options_of(config_class)))


def _spellings(entries: Iterable[Option]) -> Iterator[tuple[str, Option]]:
    for entry in entries:
        if entry.info.kind == "positional":
            continue
        yield entry.flag, entry
        if entry.type is bool:
            yield _negation(entry.flag), entry


def _negation(flag: str) -> str:
    return "--no-" + flag.removeprefix("--")


def _value_type(hint: Any) -> tuple[type, bool]:
    """The plain type behind a field's annotation, and whether None is allowed beside it."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(hint) if member is not types.NoneType]
        if len(members) == 1:
            return _value_type(members[0])[0], True
    if hint in (str, int, float, bool):
        return hint, False
    if hint == tuple[str, ...]:
        return str, False
    raise TypeError(f"an option is str, int, float or bool, perhaps with None, or a tuple of str, not {hint}")


def check_value(entry: Option, value: Any) -> None:
    """Raise OptionError unless the option can take the value."""
    default = f"The default is {entry.show(entry.default)}"
    if value is None:
        raise OptionError(entry.label, "unset", "needs a value", f"The default is {entry.show(entry.default)}")
    if entry.info.choices and value not in entry.info.choices:
        raise OptionError(
            entry.label,
            value,
            f"must be one of {', '.join(entry.info.choices)}",
            default,
        )
    limits = entry.info.limits
    if limits is not None and not limits.hold(value):
        raise OptionError(entry.label, entry.show(value), str(limits), _remedy(entry, limits, value))


def _remedy(entry: Option, limits: Limits, value: float) -> str:
    bounds = [bound for bound in (limits.minimum, limits.maximum) if bound is not None]
    nearest = bounds[0] if limits.minimum is not None and value < limits.minimum else bounds[-1]
    other = "leave it out" if entry.default is None else f"the default, {entry.show(entry.default)}"
    return f"Use {_plain(nearest)} or {other}"


def _plain(number: float | None) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"
