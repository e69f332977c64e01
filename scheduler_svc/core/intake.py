"""What a request must be to be accepted, whatever the load.

Knows one request and the longest sequence its model could take; must not know queues or replicas.
"""

from __future__ import annotations

from dataclasses import dataclass

from scheduler_svc.core.order import Order
from scheduler_svc.core.sequence import Sequence
from scheduler_svc.core.types import RefusalReason, Refused, Request

_MAX_CRASHES_ALONE = 2
"""A sequence that crashed a replica so often while alone there is failed."""


@dataclass(slots=True)
class Longest:
    """The longest sequence that any replica of a model, attached or not, could take."""

    max_model_len: int = 0
    num_cache_tokens: int = 0

    def check(self, request: Request) -> None:
        """Raises Refused if the prompt and one token can never fit."""
        num_tokens = len(request.prompt_token_ids) + 1
        for name, limit, remedy in (
            ("max_model_len", self.max_model_len, "shorten the prompt"),
            ("the KV cache in tokens", self.num_cache_tokens, "shorten the prompt or give the worker more KV memory"),
        ):
            if num_tokens > limit:
                raise Refused(RefusalReason.TOO_LONG, f"prompt + 1 token against {name}", num_tokens, limit, remedy)


def check_fields(request: Request) -> None:
    """Raises Refused, naming the field, for what no replica could serve."""
    num_prior = len(request.prior_token_ids)
    checks = (
        (request.prompt_token_ids, "number of prompt_token_ids", 0, "at least 1", "send a prompt"),
        (
            request.max_tokens > num_prior,
            "max_tokens",
            request.max_tokens,
            f"more than the {num_prior} prior tokens",
            "",
        ),
        (request.attempt >= 1, "attempt", request.attempt, "at least 1", ""),
        (all(size >= 1 for size in request.crash_group_sizes), "crash_group_sizes", "below 1", "at least 1", ""),
        (request.age_ns >= 0, "age_ns", request.age_ns, "at least 0", ""),
        (request.group_size >= 1, "group_size", request.group_size, "at least 1", ""),
        (
            request.group_size == 1 or request.group_id,
            "group_id",
            "empty",
            "a name if group_size > 1",
            "name the group",
        ),
    )
    for is_fine, name, value, limit, remedy in checks:
        if not is_fine:
            raise Refused(RefusalReason.INVALID, name, value, limit, remedy or f"correct {name}")
    num_alone = list(request.crash_group_sizes).count(1)
    if num_alone >= _MAX_CRASHES_ALONE:
        raise Refused(
            RefusalReason.POISON,
            "number of crashes of a replica that ran this sequence alone",
            num_alone,
            _MAX_CRASHES_ALONE - 1,
            "the request is not tried again",
        )


def new_sequence(request: Request, now: int, ticket: int, order: Order) -> Sequence:
    """The sequence of a request. Raises Refused for what is no token id."""
    try:
        return Sequence(request, now, ticket, order)
    except (OverflowError, TypeError) as error:
        limit = "unsigned 32-bit integers"
        raise Refused(RefusalReason.INVALID, "a token id", str(error), limit, "send ids of the vocabulary") from error
