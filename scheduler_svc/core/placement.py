"""Which replica of a model a waiting sequence goes to.

Score, in tokens: the longest cached prefix minus the replica's load. A replica that may plan now takes a sequence
unless another with room for it scores strictly better; so no replica idles while work waits that nobody else would
start.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.core.replica import Replica
from scheduler_svc.core.sequence import Sequence


def suits_another_better(sequence: Sequence, prefix: list[int], replica: Replica, others: Iterable[Replica]) -> bool:
    """Whether one of the others should take the sequence; `prefix` is what `replica` has cached of it."""
    score = len(prefix) * replica.spec.block_size - replica.load_tokens
    for other in others:
        if other is replica or not other.has_slot or not other.could_hold(sequence):
            continue
        load = other.load_tokens
        if len(sequence.token_ids) - load <= score:
            continue  # not even a whole cached prompt would make it the better one
        found = other.kv.find_prefix(sequence)
        if len(found) * other.spec.block_size - load > score and other.kv.num_missing_blocks(sequence, found) <= 0:
            return True
    return False
