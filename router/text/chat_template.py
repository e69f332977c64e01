"""The chat template of a model: found, compiled at start, and rendered within bounds.

Knows Jinja and the places where a model directory keeps a template. Whatever goes wrong at start is a
`TemplateFileError` with file and line; whatever goes wrong while rendering is the request's `InvalidRequest` with the
line. Knows nothing of tokens.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes

from router.errors import InvalidRequest
from router.text.template_bounds import render_bounded
from router.text.template_env import BoundedEnvironment

_TYPE_TESTS = frozenset({"string", "iterable", "sequence", "mapping"})
_HOW_TO_SUPPLY = (
    "add a chat_template.jinja file to the model directory or a chat_template entry to its tokenizer_config.json, "
    "or send a finished prompt to the completions endpoint"
)


class TemplateFileError(Exception):
    """A template that cannot be compiled; the message names file and line."""


@dataclass(frozen=True)
class ContentUse:
    """How a template reads a message's content, by its syntax tree."""

    iterates_parts: bool
    """It loops over the content: a list of parts is passed as it is, not joined."""
    tells_types_apart: bool
    """It asks whether the content is a string, so a plain string is fine even if it also loops."""


class ChatTemplate:
    """One compiled template. Rendering is pure and safe in several threads."""

    def __init__(self, source: str, origin: str) -> None:
        """`origin` names the file. Raises `TemplateFileError`."""
        self.source = source
        self.origin = origin
        environment = BoundedEnvironment()
        try:
            self._tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateFileError(f"{origin}, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise TemplateFileError(f"{origin}: nested too deeply to compile") from error

    @cached_property
    def constants(self) -> frozenset[str]:
        """The string constants in its expressions."""
        return frozenset(node.value for node in self._tree.find_all(nodes.Const) if isinstance(node.value, str))

    def knows(self, name: str) -> bool:
        """Whether it names a variable or a key of a message, as far as its text tells."""
        return re.search(rf"\b{re.escape(name)}\b", self.source) is not None

    @cached_property
    def literal_text(self) -> str:
        """All text the template itself may write, pieces joined by NUL."""
        data = {node.data for node in self._tree.find_all(nodes.TemplateData)}
        return "\0".join(sorted(data | self.constants))

    @cached_property
    def content_use(self) -> ContentUse:
        """Whether lists of parts are welcome, and plain strings."""
        aliases = set(_content_aliases(self._tree))
        loops = any(_is_content(loop.iter, aliases) for loop in self._tree.find_all(nodes.For))
        tests = any(
            test.name in _TYPE_TESTS and _is_content(test.node, aliases) for test in self._tree.find_all(nodes.Test)
        )
        return ContentUse(iterates_parts=loops, tells_types_apart=tests)

    def render(self, variables: dict[str, Any]) -> str:
        """The prompt text. Raises `InvalidRequest` on `messages` with what the template said, and the line."""
        try:
            return render_bounded(self._template, variables)
        except RecursionError as error:
            raise InvalidRequest(
                "messages", f"messages: the chat template calls itself without end{_line(error)}"
            ) from None
        except MemoryError:
            raise InvalidRequest("messages", "messages: the chat template makes a value too large for memory") from None
        except Exception as error:  # a template can raise anything Python can
            said = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            raise InvalidRequest(
                "messages", f"messages: the chat template refuses them{_line(error)}: {said}"
            ) from None


class ChatTemplates:
    """The named templates of a model; most have one, called "default"."""

    def __init__(self, named: Mapping[str, ChatTemplate]) -> None:
        self.named = named

    @classmethod
    def load(cls, directory: str | Path, config: Mapping[str, Any]) -> ChatTemplates:
        """Find the templates of a model directory; `config` is its tokenizer_config.json.

        chat_template.jinja wins over the configuration's default; files in additional_chat_templates/ add named ones.
        A model without a template is fine until someone chats with it. Raises `TemplateFileError`.
        """
        root = Path(directory)
        found = dict(_from_config(config, root / "tokenizer_config.json"))
        for path in sorted((root / "additional_chat_templates").glob("*.jinja")):
            found[path.stem] = _read(path)
        if (path := root / "chat_template.jinja").is_file():
            found["default"] = _read(path)
        return cls(found)

    def pick(self, *, has_tools: bool) -> ChatTemplate:
        """The template for a request: "tool_use" for one with tools where there is such, else "default"."""
        if has_tools and "tool_use" in self.named:
            return self.named["tool_use"]
        if "default" in self.named:
            default = self.named["default"]
            if has_tools and not default.knows("tools"):
                raise InvalidRequest(
                    "tools",
                    "tools: this model's chat template shows no tools to the model; leave them out, or use a model "
                    "that was trained to call tools",
                )
            return default
        if self.named:
            names = ", ".join(sorted(self.named))
            raise InvalidRequest("messages", f"messages: the model names its chat templates {names}, none is default")
        raise InvalidRequest("messages", f"messages: the model has no chat template; {_HOW_TO_SUPPLY}")


def _from_config(config: Mapping[str, Any], path: Path) -> Iterator[tuple[str, ChatTemplate]]:
    entry = config.get("chat_template")
    if entry is None:
        return
    entries = [{"name": "default", "template": entry}] if isinstance(entry, str) else entry
    if not isinstance(entries, list):
        raise TemplateFileError(f"{path}: chat_template must be a string or a list, found {type(entry).__name__}")
    for item in entries:
        match item:
            case {"name": str(name), "template": str(source)}:
                yield name, ChatTemplate(source, f"{path}, chat_template {name!r}")
            case _:
                raise TemplateFileError(f"{path}: each chat_template of a list needs a name and a template")


def _read(path: Path) -> ChatTemplate:
    try:
        return ChatTemplate(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise TemplateFileError(f"{path} is not UTF-8: {error}") from error


def _line(error: BaseException) -> str:
    """ " at line N" of the template, where the traceback knows it."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f" at line {lines[-1]}" if lines else ""


def _content_aliases(tree: nodes.Template) -> Iterator[str]:
    """Variables that hold a message's content: those called so, and those assigned from it."""
    yield "content"
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set()):
            yield assign.target.name


def _is_content(node: nodes.Node, aliases: set[str]) -> bool:
    """Whether an expression is some message's content, also behind filters."""
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    match node:
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Name():
            return node.name in aliases
        case _:
            return False
