"""The models that this router speaks for, by name: each one's text side, and the aliases over them.

Owned by the event loop; a change replaces whole tables, so that a request sees one state. Knows what is said here, not
what workers serve.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from router.errors import NotFound, show_value
from router.models.aliases import Alias, sticky_key
from router.requests import GenerationRequest
from router.text.model_text import ModelText


class Catalogue:
    """Begins with the one model of the command line, whose text comes once it is read."""

    def __init__(self, primary: str) -> None:
        self.primary = primary
        self._texts: dict[str, ModelText] = {}
        self.aliases: Mapping[str, Alias] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The models, the primary first."""
        return (self.primary, *sorted(self._texts.keys() - {self.primary}))

    def text(self, name: str) -> ModelText | None:
        """The model's text side; None while the primary's is being read."""
        return self._texts.get(name)

    def add(self, text: ModelText) -> None:
        """The primary's text has been read."""
        self._texts = {**self._texts, text.name: text}

    def replace_others(self, texts: Mapping[str, ModelText], aliases: Mapping[str, Alias]) -> None:
        """All models but the primary, and all aliases. Requests that run keep what they have."""
        kept = {name: text for name, text in self._texts.items() if name == self.primary}
        self._texts, self.aliases = {**kept, **texts}, aliases

    def model_of(self, name: str) -> str:
        """The model of that name, or the one that most requests for that alias get; empty is the primary.

        Raises NotFound with the names there are.
        """
        if not name:
            return self.primary
        if name in self.names:
            return name
        if name in self.aliases:
            return self.aliases[name].heaviest
        known = ", ".join((*self.names, *sorted(self.aliases)))
        raise NotFound("model", f"model {show_value(name)} is not served here; served: {known}")

    def route(self, request: GenerationRequest, is_ready: Callable[[str], bool]) -> GenerationRequest:
        """The request with a model's own name in place of an alias. Raises NotFound.

        A model that is not ready loses its requests to the others behind the alias, while there is one that is.
        """
        name = request.options.model
        if alias := self.aliases.get(name):
            ready = frozenset(filter(is_ready, alias.weights))
            model = alias.pick(sticky_key(alias.sticky, request.options.tenant, request), ready)
        else:
            model = self.model_of(name)
        return replace(request, options=replace(request.options, model=model))
