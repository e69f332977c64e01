"""The models that this router speaks for, by name: each one's text side, and the aliases over them.

Owned by the event loop; a change replaces whole tables, so that a request sees one state. Knows what is said here, not
what workers serve.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace

from octavo.internal.v1.scheduler_pb2 import AliasTable
from router.errors import NotFound, show_value
from router.models.aliases import Alias, sticky_key
from router.models.told import read_aliases
from router.requests import GenerationRequest
from router.text.model_text import ModelText

_LOG = logging.getLogger(__name__)


class Catalogue:
    """Begins with the models of the command line, whose texts come once they are read."""

    def __init__(self, primary: str, *others: str) -> None:
        self.primary = primary
        self.own = (primary, *others)
        self._texts: dict[str, ModelText] = {}
        self._of_file: Mapping[str, Alias] = {}
        self._told = AliasTable()
        self.aliases: Mapping[str, Alias] = {}
        """By name; none is a model's."""

    @property
    def names(self) -> tuple[str, ...]:
        """The models, those of the command line first."""
        return (*self.own, *sorted(self._texts.keys() - set(self.own)))

    def text(self, name: str) -> ModelText | None:
        """The model's text side; None while it is being read."""
        return self._texts.get(name)

    def add(self, text: ModelText) -> None:
        """The text of a model of the command line has been read."""
        self._texts = {**self._texts, text.name: text}
        self._join_aliases()

    def replace_others(self, texts: Mapping[str, ModelText], aliases: Mapping[str, Alias]) -> None:
        """All models and aliases of the file. Requests that run keep what they have."""
        kept = {name: text for name, text in self._texts.items() if name in self.own}
        self._texts, self._of_file = {**kept, **texts}, aliases
        self._join_aliases()

    def take_told(self, table: AliasTable) -> None:
        """All aliases that operators have set; each goes before the file's of the same name."""
        if table.changed_at_ns != self._told.changed_at_ns:
            self._told = table
            self._join_aliases()
            _LOG.info("aliases: %s", ", ".join(self.aliases) or "none")

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

    def _join_aliases(self) -> None:
        models = set(self.names)
        joined: dict[str, Alias] = {}
        for name, alias in {**self._of_file, **read_aliases(self._told)}.items():
            # An operator may name what this router has no text of, or not yet.
            weights = {model: weight for model, weight in alias.weights.items() if model in models}
            if weights and name not in models:
                joined[name] = replace(alias, weights=weights)
        self.aliases = joined
