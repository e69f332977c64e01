"""The file of --models: further models with where their text comes from, and aliases.

    [models.coder]
    path = "/models/coder"          # a directory, a .gguf file or a hub name
    tool_call_parser = "hermes"     # as --tool-call-parser; "auto" when left out
    reasoning_parser = "auto"       # as --reasoning-parser

    [aliases.assistant]
    sticky = "user"                 # or "conversation", when left out
    weights = { base = 95, coder = 5 }

Knows TOML and the fields; loads nothing. Whatever is wrong is a `ModelsFileError` that names file and entry.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.models.aliases import STICKY, Alias
from router.replies.formats import TOOL_CALL_PARSERS
from router.replies.reasoning import REASONING_PARSERS


class ModelsFileError(Exception):
    """The file cannot be taken; the message names file and entry."""


@dataclass(frozen=True)
class ModelEntry:
    """Where one model's tokenizer and template are, and how its answers are read."""

    path: str
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"


@dataclass(frozen=True)
class ModelsFile:
    """The whole file."""

    models: Mapping[str, ModelEntry] = field(default_factory=dict)
    aliases: Mapping[str, Alias] = field(default_factory=dict)


def read_models_file(path: str | Path, own: Collection[str]) -> ModelsFile:
    """Read and check it. `own` are the models of the command line. Raises ModelsFileError."""
    try:
        given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ModelsFileError(f"{path} cannot be read: {error}") from None
    try:
        _refuse_unknown("", given, ("models", "aliases"))
        models = {name: _entry(f"models.{name}", value) for name, value in _table("models", given).items()}
        if twice := sorted(models.keys() & set(own)):
            raise ValueError(f"models.{twice[0]} is a model of the command line; leave it out")
        aliases = {name: _alias(name, value, {*own, *models}) for name, value in _table("aliases", given).items()}
    except ValueError as error:
        raise ModelsFileError(f"{path}: {error}") from None
    return ModelsFile(models, aliases)


def _entry(where: str, value: object) -> ModelEntry:
    if isinstance(value, str):
        return ModelEntry(value)
    table = _as_table(where, value)
    _refuse_unknown(f"{where}.", table, ("path", "tool_call_parser", "reasoning_parser"))
    if not isinstance(table.get("path"), str):
        raise ValueError(f"{where}.path must be text, found {table.get('path')!r}")
    _check_choice(f"{where}.tool_call_parser", table.get("tool_call_parser", "auto"), TOOL_CALL_PARSERS)
    _check_choice(f"{where}.reasoning_parser", table.get("reasoning_parser", "auto"), REASONING_PARSERS)
    return ModelEntry(**table)


def _alias(name: str, value: object, models: set[str]) -> Alias:
    where = f"aliases.{name}"
    table = _as_table(where, value)
    _refuse_unknown(f"{where}.", table, ("sticky", "weights"))
    if name in models:
        raise ValueError(f"{where} is the name of a model too")
    weights = _table("weights", table)
    if not weights:
        raise ValueError(f"{where}.weights must name at least one model")
    for model, weight in weights.items():
        if model not in models:
            raise ValueError(f"{where}.weights.{model}: no such model; there are {', '.join(sorted(models))}")
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
        if not is_number or not math.isfinite(weight) or weight < 0:
            raise ValueError(f"{where}.weights.{model} must be a number of at least 0, found {weight!r}")
    positive = {model: float(weight) for model, weight in weights.items() if weight > 0}
    if not positive:
        raise ValueError(f"{where}.weights must hold one over 0")
    sticky = table.get("sticky", "conversation")
    _check_choice(f"{where}.sticky", sticky, STICKY)
    return Alias(name, positive, sticky)


def _table(name: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    return _as_table(name, given.get(name, {}))


def _as_table(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be a table, found {value!r}")
    return value


def _check_choice(where: str, value: object, choices: Iterable[str]) -> None:
    if value not in tuple(choices):
        raise ValueError(f"{where} must be one of {', '.join(choices)}, found {value!r}")


def _refuse_unknown(where: str, table: Mapping[str, Any], known: Iterable[str]) -> None:
    for name in table:
        if name not in tuple(known):
            raise ValueError(f"{where}{name} is not known here; known: {', '.join(known)}")
