"""Whether a waiting sequence leaves those that run the blocks that they will grow into.

Reads one replica's rows, memory and what is known of growth; keeps the foresight in the rows, and decides nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from scheduler_svc.core.foresight import Foresight
from scheduler_svc.core.growth import Growth
from scheduler_svc.core.kv_space import Prefix
from scheduler_svc.core.rows import Rows
from scheduler_svc.core.sequence import Sequence


def may_grow(rows: Rows, growth: Growth, step: int, newcomer: tuple[Sequence, Prefix], worse: Items[Sequence]) -> bool:
    """Whether all that run, the worse apart, and the newcomer will fit as far as they are thought to grow.

    `step`: number of the step that is being made.
    """
    sequence, prefix = newcomer
    if len(rows.running) == len(worse):
        return True
    # Mostly there is room by far, and it need not be looked at closely.
    kv, pool = rows.kv, rows.kv.pool
    num_most = rows.num_most_blocks + kv.num_blocks_for(rows.end_of(sequence))
    num_growing = growth.num_longest_blocks * (len(rows.running) + 1)
    if num_most <= pool.num_blocks or kv.num_blocks_for(len(sequence.token_ids)) + num_growing <= pool.num_idle:
        return True
    foresight = _foresight(rows, growth, step, worse)
    num_shared = foresight.num_shared + sum(1 for block in prefix.device if pool.holds[block])
    return foresight.peak_blocks(*_foresee(rows, growth, sequence)) - num_shared <= pool.num_blocks


def _foresight(rows: Rows, growth: Growth, step: int, worse: Items[Sequence]) -> Foresight:
    """What the running ones, but for the worse, will hold."""
    found, pool, size = rows.foresight, rows.kv.pool, rows.kv.block_size
    if found is None or worse or step - found.made_at_step >= size:
        left_out = set(worse)
        kept = [row for row in rows.running if row not in left_out]
        # Without the worse, what the others hold has to be looked at; with them it is all that is held.
        num_held = len({b for row in kept for b in row.block_ids}) if worse else pool.num_blocks - pool.num_idle
        num_shared = sum([len(row.block_ids) for row in kept]) - num_held
        lengths = [_foresee(rows, growth, row) for row in kept]
        found = Foresight(lengths, size, num_shared=num_shared, made_at_step=step)
        if not worse:
            rows.foresight = found
    return found


def _foresee(rows: Rows, growth: Growth, sequence: Sequence) -> tuple[int, int]:
    """Its tokens, and those to come."""
    return len(sequence.token_ids), growth.num_remaining_tokens(sequence, rows.end_of(sequence))
