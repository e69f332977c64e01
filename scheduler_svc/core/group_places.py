"""Places in the waiting room for those of a group that did not come yet, so that a group is accepted or refused as one.

Knows requests; must not know who waits. The first of a group takes places for all: as many sequences, each with as many
tokens as itself. They are given up one by one as the others come, and all at once when a member ends. Who comes later
still was accepted with the first and is let in, but no place is kept for anybody any more.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.types import Request

_MAX_LATE_GROUPS = 1024


@dataclass(slots=True)
class Places:
    """Some places."""

    num_sequences: int = 0
    num_tokens: int = 0
    """Known tokens that they are for."""


class GroupPlaces:
    """Places by group, with their sums."""

    __slots__ = ("_groups", "_late", "_tenants", "total")

    def __init__(self) -> None:
        self._groups: dict[tuple[int, str], tuple[str, int, int]] = {}  # -> tenant, places left, tokens of each
        self._late: dict[tuple[int, str], int] = {}  # without places -> members that did not come, oldest first
        self._tenants: dict[str, Places] = {}  # those with places
        self.total = Places()

    def of_tenant(self, tenant: str) -> Places:
        """A tenant's part."""
        return self._tenants.get(tenant) or Places()

    def has_for(self, request: Request) -> bool:
        """Whether it is let in, since the first of its group was accepted on behalf of all."""
        group = _group(request)
        return request.attempt == 1 and (group in self._groups or group in self._late)

    def note_accepted(self, request: Request) -> None:
        """A member of a group came, the first one on behalf of all."""
        if request.group_size == 1 or request.attempt > 1:
            return
        group = _group(request)
        if group in self._late:
            self._set_late(group, self._late[group] - 1)
            return
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
        group = _group(request)
        kept = self._groups.pop(group, None)
        if kept is not None:
            tenant, num_left, num_tokens = kept
            self._count(tenant, -num_left, num_tokens)
            self._set_late(group, num_left)

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

    def _set_late(self, group: tuple[int, str], num_left: int) -> None:
        if num_left == 0:
            del self._late[group]
            return
        self._late[group] = num_left
        if len(self._late) > _MAX_LATE_GROUPS:
            del self._late[next(iter(self._late))]

    def _count(self, tenant: str, num_sequences: int, num_tokens: int) -> None:
        own = self._tenants.setdefault(tenant, Places())
        for places in (self.total, own):
            places.num_sequences += num_sequences
            places.num_tokens += num_sequences * num_tokens
        if not own.num_sequences:
            del self._tenants[tenant]


def _group(request: Request) -> tuple[int, str]:
    return (request.router_id, request.group_id)
