"""Aliases as the scheduler tells them: those that operators have set. Knows the wire and the shape of an alias."""

from __future__ import annotations

from collections.abc import Mapping

from octavo.internal.v1 import scheduler_pb2
from router.models.aliases import Alias


def read_aliases(table: scheduler_pb2.AliasTable) -> Mapping[str, Alias]:
    """The aliases by name."""
    return {
        alias.name: Alias(
            alias.name,
            dict(alias.weights),
            "user" if alias.sticky == scheduler_pb2.STICKINESS_USER else "conversation",
        )
        for alias in table.aliases
    }
