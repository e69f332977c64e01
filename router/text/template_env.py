"""The sandbox in which chat templates run: transformers' environment, with every way to run on bounded.

Jinja has no `while`, but nested ranges, macros that call themselves, doubling strings and giant powers are as good as
an endless loop. No watchdog outside can stop a thread that computes, so the template counts for itself: the compiled
code is rewritten so that each turn of a loop and each call spends from a `Budget`, and each operator that can make a
large value is asked for its size first. Time is CPU time of the rendering thread, so a busy machine refuses nothing.
Knows nothing of messages or tokens.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from functools import wraps
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TURNS = 1_000_000
MAX_CPU_S = 2.0
MAX_CHARS = 32 * 2**20
MAX_ITEMS = 1_000_000
MAX_INTEGER_BITS = 1_000_000
_TURNS_PER_CLOCK_READ = 16
_WIDE_FIELD = re.compile(r"%[^%a-zA-Z]*(\d{7}|\*)")

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


_budget: ContextVar[Budget] = ContextVar("octavo_template_budget")


def render_bounded(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render within a fresh budget. Raises what the template raises, and `TemplateOverrun`."""
    token = _budget.set(Budget(MAX_TURNS, time.thread_time() + MAX_CPU_S))
    try:
        return template.render(**variables)
    finally:
        _budget.reset(token)


class _BoundedCode(CodeGenerator):
    """Compiles a template whose loops and `~` go through the environment's bounded forms."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        for loop in node.find_all(nodes.For):
            loop.iter = _call_environment("bounded_iter", cast(nodes.Expr, loop.iter))
        for parent in [node, *node.find_all(nodes.Node)]:
            _replace_concats(parent)
        super().visit_Template(node, frame)


def _call_environment(method: str, argument: nodes.Expr) -> nodes.Call:
    target = nodes.EnvironmentAttribute(method, lineno=argument.lineno)
    return nodes.Call(target, [argument], [], None, None, lineno=argument.lineno)


def _replace_concats(parent: nodes.Node) -> None:
    """Turn each `a ~ b` directly below `parent` into a bounded call with the same parts."""
    for name, value in list(parent.iter_fields()):
        if isinstance(value, nodes.Concat):
            setattr(parent, name, _bounded_concat(value))
        elif isinstance(value, list):
            value[:] = [_bounded_concat(item) if isinstance(item, nodes.Concat) else item for item in value]


def _bounded_concat(node: nodes.Concat) -> nodes.Call:
    return _call_environment("bounded_text", nodes.List(node.nodes, lineno=node.lineno))


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, bounded. It holds no state of a rendering."""

    code_generator_class = _BoundedCode
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["dict"] = _Dict()
        self.globals["namespace"] = _Namespace
        del self.globals["lipsum"]  # text of any length out of nothing
        for name in ("center", "indent", "wordwrap", "format", "batch", "slice", "truncate", "tojson"):
            self.filters[name] = _guarded(self.filters[name], _check_filter_numbers)
        self.filters["join"] = _guarded(self.filters["join"], _check_filter_join)
        self.filters["replace"] = _guarded(self.filters["replace"], _check_filter_replace)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join output as it is produced, so that too much of it ends the rendering early."""
        parts: list[str] = []
        num_chars = 0
        for piece in pieces:
            num_chars += len(piece)
            _check_chars(num_chars)
            parts.append(piece)
        return "".join(parts)

    def bounded_iter(self, items: Iterable[Any]) -> Iterator[Any]:
        """`items`, each spending a turn."""
        budget = _budget.get()
        for item in items:
            budget.spend_turn()
            yield item

    def bounded_text(self, parts: list[Any]) -> str:
        """What `~` means without autoescape."""
        return self.concat(map(str, parts))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template: macros, methods, functions."""
        _budget.get().spend_turn()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            args = _check_string_call(owner, name, args)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, str):
            _check_chars(len(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, refused when the result would be too large."""
        match operator:
            case "+" if isinstance(left, str) and isinstance(right, str):
                _check_chars(len(left) + len(right))
            case "+" if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                _check_count("items", len(left) + len(right), MAX_ITEMS)
            case "*":
                _check_product(left, right)
            case "**" if isinstance(left, int) and isinstance(right, int):
                _check_count("bits", left.bit_length() * max(right, 0), MAX_INTEGER_BITS)
            case "%" if isinstance(left, str) and _WIDE_FIELD.search(left):
                raise TemplateOverrun("the chat template formats into a field of more than 999999 characters")
            case _:
                pass
        return super().call_binop(context, operator, left, right)


class _GenerationTag(Extension):
    """`{% generation %}` marks text for training. When rendering it is its body, in a scope of its own."""

    tags = {"generation"}  # noqa: RUF012  # the name and type jinja2 asks for

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(lineno)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The global `dict` without the attributes of a type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """The global `namespace`, which keeps no name that begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` is a legal attribute name
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the name {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _guarded(function: Callable[..., Any], check: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments are checked first. `wraps` carries jinja2's marks for context arguments over."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return function(*args, **kwargs)

    return guarded


def _check_string_call(text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
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
            _check_count("as a number", abs(value), MAX_ITEMS)


def _check_filter_numbers(_value: Any, *args: Any, **kwargs: Any) -> None:
    _check_numbers(*args, **kwargs)


def _check_filter_join(_context: Any, value: Any, d: Any = "", attribute: Any = None) -> None:
    if hasattr(value, "__len__"):
        _check_chars(len(value) * len(str(d)))


def _check_filter_replace(_context: Any, s: Any, old: Any, new: Any, count: Any = None) -> None:
    _check_replace(str(s), str(old), str(new))


def _check_join(separator: str, items: Iterable[Any]) -> list[Any]:
    parts = list(items)
    _check_chars(len(separator) * len(parts) + sum(len(part) for part in parts if isinstance(part, str)))
    return parts


def _check_replace(text: str, old: str, new: str) -> None:
    _check_chars(len(text) + text.count(old) * len(new))


def _check_product(left: Any, right: Any) -> None:
    for value, factor in ((left, right), (right, left)):
        if isinstance(value, str) and isinstance(factor, int):
            _check_chars(len(value) * max(factor, 0))
        elif isinstance(value, (list, tuple)) and isinstance(factor, int):
            _check_count("items", len(value) * max(factor, 0), MAX_ITEMS)
    if isinstance(left, int) and isinstance(right, int):
        _check_count("bits", left.bit_length() + right.bit_length(), MAX_INTEGER_BITS)


def _check_chars(num_chars: int) -> None:
    _check_count("characters", num_chars, MAX_CHARS)


def _check_count(unit: str, count: int, limit: int) -> None:
    if count > limit:
        raise TemplateOverrun(f"the chat template makes a value of {count} {unit}; at most {limit} are allowed")
