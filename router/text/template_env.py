"""The sandbox in which chat templates run: transformers' environment, with every way to run on bounded.

Jinja has no `while`, but nested ranges, macros that call themselves, doubling strings and giant powers are as good as
an endless loop. No watchdog outside can stop a thread that computes, so the template counts for itself: the compiled
code is rewritten so that each turn of a loop and each call spends from a `Budget`, and each operator that can make a
large value is asked for its size first. Time is CPU time of the rendering thread, so a busy machine refuses nothing.
Knows nothing of messages or tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.text.template_bounds import (
    BUDGET,
    MAX_INTEGER_BITS,
    MAX_ITEMS,
    WIDE_FIELD,
    TemplateOverrun,
    check_chars,
    check_count,
    check_filter_join,
    check_filter_numbers,
    check_filter_replace,
    check_product,
    check_string_call,
)


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
            self.filters[name] = _guarded(self.filters[name], check_filter_numbers)
        self.filters["join"] = _guarded(self.filters["join"], check_filter_join)
        self.filters["replace"] = _guarded(self.filters["replace"], check_filter_replace)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join output as it is produced, so that too much of it ends the rendering early."""
        parts: list[str] = []
        num_chars = 0
        for piece in pieces:
            num_chars += len(piece)
            check_chars(num_chars)
            parts.append(piece)
        return "".join(parts)

    def bounded_iter(self, items: Iterable[Any]) -> Iterator[Any]:
        """`items`, each spending a turn."""
        budget = BUDGET.get()
        for item in items:
            budget.spend_turn()
            yield item

    def bounded_text(self, parts: list[Any]) -> str:
        """What `~` means without autoescape."""
        return self.concat(map(str, parts))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Every call in a template: macros, methods, functions."""
        BUDGET.get().spend_turn()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            args = check_string_call(owner, name, args)
        result = super().call(context, obj, *args, **kwargs)
        if isinstance(result, str):
            check_chars(len(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`+`, `*`, `**` and `%`, refused when the result would be too large."""
        match operator:
            case "+" if isinstance(left, str) and isinstance(right, str):
                check_chars(len(left) + len(right))
            case "+" if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
                check_count("items", len(left) + len(right), MAX_ITEMS)
            case "*":
                check_product(left, right)
            case "**" if isinstance(left, int) and isinstance(right, int):
                check_count("bits", left.bit_length() * max(right, 0), MAX_INTEGER_BITS)
            case "%" if isinstance(left, str) and WIDE_FIELD.search(left):
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
