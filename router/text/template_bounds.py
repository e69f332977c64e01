"""What one rendering of a chat template may spend and make: turns, time, and the size of each value.

Every check asks for a size before the value is made. Knows numbers and strings; knows no environment and no messages.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jinja2

MAX_TURNS = 1_000_000
MAX_CPU_S = 2.0
MAX_CHARS = 32 * 2**20
MAX_ITEMS = 1_000_000
MAX_INTEGER_BITS = 1_000_000
_TURNS_PER_CLOCK_READ = 16
WIDE_FIELD = re.compile(r"%[^%a-zA-Z]*(\d{7}|\*)")

_WIDE_BRACES = re.compile(r"\{[^{}]*(:[^{}]*\d{7}|\{)")


class TemplateOverrun(jinja2.TemplateError):
    """A template spent more than it may; the message names the limit."""


@dataclass
class Budget:
    """What one rendering may still spend. Made for one rendering and dropped after it."""

    turns_left: int
    cpu_deadline_s: float
    """On the clock of `time.thread_time`."""

    def spend_turn(self) -> None:
        """One turn of a loop, or one call."""
        self.turns_left -= 1
        if self.turns_left < 0:
            raise TemplateOverrun(f"the chat template ran more than {MAX_TURNS} loop turns and calls")
        if self.turns_left % _TURNS_PER_CLOCK_READ == 0 and time.thread_time() > self.cpu_deadline_s:
            raise TemplateOverrun(f"the chat template ran for more than {MAX_CPU_S:g} s")


BUDGET: ContextVar[Budget] = ContextVar("octavo_template_budget")


def render_bounded(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render within a fresh budget. Raises what the template raises, and `TemplateOverrun`."""
    token = BUDGET.set(Budget(MAX_TURNS, time.thread_time() + MAX_CPU_S))
    try:
        return template.render(**variables)
    finally:
        BUDGET.reset(token)


def check_string_call(text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for a method of a string, once its result is known to be of a sane size."""
    match name:
        case "format" | "format_map":
            if _WIDE_BRACES.search(text):
                raise TemplateOverrun("the chat template formats into a field whose width is large or computed")
        case "join" if args:
            return (_check_join(text, args[0]), *args[1:])
        case "replace" if len(args) >= 2:
            _check_replace(text, str(args[0]), str(args[1]))
        case _:
            _check_numbers(*args)
    return args


def _check_numbers(*args: Any, **kwargs: Any) -> None:
    """No number that a template gives to a method of a string is a legitimate width or count beyond `MAX_ITEMS`."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            check_count("as a number", abs(value), MAX_ITEMS)


def check_filter_numbers(_value: Any, *args: Any, **kwargs: Any) -> None:
    _check_numbers(*args, **kwargs)


def check_filter_join(_context: Any, value: Any, d: Any = "", attribute: Any = None) -> None:
    if hasattr(value, "__len__"):
        check_chars(len(value) * len(str(d)))


def check_filter_replace(_context: Any, s: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_replace(str(s), str(old), str(new))


def _check_join(separator: str, items: Iterable[Any]) -> list[Any]:
    parts = list(items)
    check_chars(len(separator) * len(parts) + sum(len(part) for part in parts if isinstance(part, str)))
    return parts


def _check_replace(text: str, old: str, new: str) -> None:
    check_chars(len(text) + text.count(old) * len(new))


def check_product(left: Any, right: Any) -> None:
    for value, factor in ((left, right), (right, left)):
        if isinstance(value, str) and isinstance(factor, int):
            check_chars(len(value) * max(factor, 0))
        elif isinstance(value, (list, tuple)) and isinstance(factor, int):
            check_count("items", len(value) * max(factor, 0), MAX_ITEMS)
    if isinstance(left, int) and isinstance(right, int):
        check_count("bits", left.bit_length() + right.bit_length(), MAX_INTEGER_BITS)


def check_chars(num_chars: int) -> None:
    check_count("characters", num_chars, MAX_CHARS)


def check_count(unit: str, count: int, limit: int) -> None:
    if count > limit:
        raise TemplateOverrun(f"the chat template makes a value of {count} {unit}; at most {limit} are allowed")
