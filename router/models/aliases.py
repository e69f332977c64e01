"""Names that stand for several models by weight, and which of them a request gets.

Pure. A request's key, of its user or its conversation, always falls to the same model while the weights stay. When they
change, only as many keys move as must: each model draws a score for the key, and the best of the weighted scores wins
(weighted rendezvous hashing, Schindelhauer and Schomaker 2005).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from router.requests import ChatPrompt, GenerationRequest

Sticky: TypeAlias = Literal["user", "conversation"]
STICKY: tuple[Sticky, ...] = get_args(Sticky)
_MAX_KEY_ITEMS = 256


@dataclass(frozen=True)
class Alias:
    """A name and the models behind it, by weight; weights are positive and need not sum up to anything."""

    name: str
    weights: Mapping[str, float]
    sticky: Sticky = "conversation"

    def pick(self, key: str, among: frozenset[str] = frozenset()) -> str:
        """The model for this key, of those in `among`, where the alias has any of them: others' keys stay with them."""
        models = sorted(self.weights.keys() & among) or sorted(self.weights)
        return max(models, key=lambda model: self._score(model, key))

    @property
    def heaviest(self) -> str:
        """The model that most requests get."""
        return max(sorted(self.weights), key=lambda model: self.weights[model])

    def _score(self, model: str, key: str) -> float:
        data = json.dumps([self.name, model, key]).encode()
        drawn = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
        return -self.weights[model] / math.log((drawn + 0.5) / 2**64)


def sticky_key(sticky: Sticky, tenant: str, request: GenerationRequest) -> str:
    """What a request has in common with those that shall get the same model.

    The user, where the alias goes by users and the request names one; else the conversation's beginning, up to and with
    the first user's turn, or a prompt's.
    """
    if sticky == "user" and request.options.user:
        return json.dumps([tenant, request.options.user])
    try:
        return json.dumps([tenant, _beginning(request)], default=str)
    except RecursionError:  # no conversation is nested so deep; it will be refused with its fields
        return json.dumps([tenant])


def _beginning(request: GenerationRequest) -> object:
    prompt = request.prompt
    if not isinstance(prompt, ChatPrompt):
        value = prompt.value
        return value[:_MAX_KEY_ITEMS] if isinstance(value, (str, list, tuple)) else None
    if not isinstance(prompt.messages, Sequence):
        return None
    begun: list[object] = []
    for message in prompt.messages[:_MAX_KEY_ITEMS]:
        begun.append(message)
        if isinstance(message, Mapping) and message.get("role") == "user":
            break
    return begun
