"""The aliases that operators have set: checked here, told to every router by Watch.

The table lives as long as this process or any router does: routers bring it back to a scheduler that was started anew.
Knows names and weights; must not know requests.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection

from octavo.internal.v1 import scheduler_pb2 as pb

_LOG = logging.getLogger(__name__)

MAX_NAME_CHARS = 128
MAX_ALIASES = 1024


class BadAlias(ValueError):
    """It cannot be set; the message names what is wrong with it, and the remedy."""


class AliasBook:
    """One table. `table` is replaced, never changed."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        """`now_ns`: nanoseconds since 1970, by which routers and schedulers agree on which table is the later."""
        self._now_ns = now_ns
        self.table = pb.AliasTable()

    def adopt(self, table: pb.AliasTable) -> bool:
        """Take a table that a router was told, where it is later than this one; whether it was."""
        if table.changed_at_ns <= self.table.changed_at_ns:
            return False
        self.table = table
        _LOG.info("aliases as a router was told them: %s", ", ".join(alias.name for alias in table.aliases) or "none")
        return True

    def set(self, alias: pb.Alias, models: Collection[str]) -> None:
        """Put it in place of one of the same name. `models` are those that are served. Raises BadAlias."""
        checked = _check(alias, models)
        others = [other for other in self.table.aliases if other.name != checked.name]
        if len(others) >= MAX_ALIASES:
            raise BadAlias(f"there are {len(others)} aliases, as many as may be; remove one first")
        self._replace([*others, checked])
        _LOG.info("alias %s: %s", checked.name, _shown(checked))

    def remove(self, name: str) -> bool:
        """Take it back; whether it was there."""
        others = [other for other in self.table.aliases if other.name != name]
        if len(others) == len(self.table.aliases):
            return False
        self._replace(others)
        _LOG.info("alias %s is removed", name)
        return True

    def _replace(self, aliases: list[pb.Alias]) -> None:
        changed_at_ns = max(self._now_ns(), self.table.changed_at_ns + 1)
        self.table = pb.AliasTable(changed_at_ns=changed_at_ns, aliases=sorted(aliases, key=lambda alias: alias.name))


def _check(alias: pb.Alias, models: Collection[str]) -> pb.Alias:
    """The alias without models of weight 0. Raises BadAlias."""
    name, known = alias.name, ", ".join(sorted(models)) or "none yet"
    if not (0 < len(name) <= MAX_NAME_CHARS and name.isprintable() and not any(char.isspace() for char in name)):
        raise BadAlias(
            f"alias.name {name[:MAX_NAME_CHARS]!r}: must have 1 to {MAX_NAME_CHARS} characters and no blanks"
        )
    if name in models:
        raise BadAlias(f"alias.name {name!r} is the name of a model; give the alias another")
    for model, weight in alias.weights.items():
        if model not in models:
            raise BadAlias(f"alias.weights: {model!r} is not served; models are {known}")
        if not (math.isfinite(weight) and weight >= 0):
            raise BadAlias(f"alias.weights: the weight of {model} must be a number of at least 0, got {weight:g}")
    positive = {model: weight for model, weight in alias.weights.items() if weight > 0}
    if not positive:
        raise BadAlias(f"alias.weights: some model must have a weight above 0; models are {known}")
    if alias.sticky not in pb.Stickiness.values():
        raise BadAlias(f"alias.sticky {alias.sticky}: must be CONVERSATION or USER")
    return pb.Alias(name=name, weights=positive, sticky=alias.sticky or pb.STICKINESS_CONVERSATION)


def _shown(alias: pb.Alias) -> str:
    return ", ".join(f"{model} {weight:g}" for model, weight in sorted(alias.weights.items()))
