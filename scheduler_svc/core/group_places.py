"""Places in the waiting room for those of a group that did not come yet, so that a group is accepted or refused as one.

Knows requests; must not know who waits. The first of a group takes places for all: as many sequences, each with as many
tokens as itself. They are given up one by one as the others come, and all at once when a member ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.types import Request


@dataclass(slots=True)
class Places:
    """Some places."""

    num_sequences: int = 0
    num_tokens: int = 0
    """Known tokens that they are for."""


class GroupPlaces:
    """Places by group, with their sums."""

    __slots__ = ("_groups", "_tenants", "total")

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str], tuple[str, int, int]] = {}  # -> tenant, places left, tokens of each
        self._tenants: dict[str, Places] = {}  # those with places
        self.total = Places()

    def of_tenant(self, tenant: str) -> Places:
        """A tenant's part."""
        return self._tenants.get(tenant) or Places()

    def has_for(self, request: Request) -> bool:
        """Whether a place is kept for it, since the first of its group was accepted on behalf of all."""
        return request.attempt == 1 and _group(request) in self._groups

    def note_accepted(self, request: Request) -> None:
        """A member of a group came, the first one on behalf of all."""
        if request.group_size == 1 or request.attempt > 1:
            return
        group = _group(request)
        kept = self._groups.get(group)
        if kept is None:
            tenant, num_tokens = request.tenant, len(request.prompt_token_ids) + len(request.prior_token_ids)
            num_left = request.group_size - 1
            self._count(tenant, num_left, num_tokens)
        else:
            tenant, num_left, num_tokens = kept[0], kept[1] - 1, kept[2]
            self._count(tenant, -1, num_tokens)
        if num_left:
            self._groups[group] = (tenant, num_left, num_tokens)
        else:
            self._groups.pop(group, None)

    def note_ended(self, request: Request) -> None:
        """A member of a group ended: no place is kept for those that did not come."""
        kept = self._groups.pop(_group(request), None)
        if kept is not None:
            tenant, num_left, num_tokens = kept
            self._count(tenant, -num_left, num_tokens)

    def check(self) -> bool:
        """Whether the sums are those of the groups."""
        counted: dict[str, Places] = {}
        for tenant, num_left, num_tokens in self._groups.values():
            own = counted.setdefault(tenant, Places())
            own.num_sequences += num_left
            own.num_tokens += num_left * num_tokens
        num_sequences = sum(own.num_sequences for own in counted.values())
        num_tokens = sum(own.num_tokens for own in counted.values())
        return counted == self._tenants and self.total == Places(num_sequences, num_tokens)

    def _count(self, tenant: str, num_sequences: int, num_tokens: int) -> None:
        own = self._tenants.setdefault(tenant, Places())
        for places in (self.total, own):
            places.num_sequences += num_sequences
            places.num_tokens += num_sequences * num_tokens
        if not own.num_sequences:
            del self._tenants[tenant]


def _group(request: Request) -> tuple[int, str]:
    return (request.router_id, request.group_id)
