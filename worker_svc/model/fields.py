"""Typed access to the fields of a config.json. Knows types and ranges; no field by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.model_families import ModelConfigError


@dataclass(frozen=True)
class Fields:
    """One mapping of a config.json. Every error is a ModelConfigError that names the field and its value."""

    values: Mapping[str, Any]
    # How errors call the mapping.
    place: str = "config.json"

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.values.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.fault(name, "expected a whole number of at least 1")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value: Any = self.values.get(name)
        value = default if value is None else value
        if not _is_number(value) or not value > 0:
            raise self.fault(name, "expected a number above 0")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return None if self.values.get(name) is None else self.number(name)

    def optional_count(self, name: str) -> int | None:
        return None if self.values.get(name) is None else self.count(name)

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """A list of `length` positive numbers."""
        value = self.values.get(name)
        if not isinstance(value, list) or not all(_is_number(item) and item > 0 for item in value):
            raise self.fault(name, "expected a list of numbers above 0")
        if len(value) != length:
            raise ModelConfigError(f"{self.place}: {name} has {len(value)} entries, expected {length}")
        return tuple(float(item) for item in value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.fault(name, "expected true or false")
        return value

    def fault(self, name: str, expected: str) -> ModelConfigError:
        """The error for a field that is not as `expected` says."""
        return ModelConfigError(f"{self.place}: {name} is {self.values.get(name)!r}, {expected}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
