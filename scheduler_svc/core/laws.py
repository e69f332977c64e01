"""The laws of the core, checked from outside: every count is made anew from the tables it should agree with.

Reads everything and changes nothing. Slow (it walks all blocks): for tests after every transition, and on demand.
"""

from __future__ import annotations

from collections import Counter

from scheduler_svc.core.replica import Replica
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, State
from scheduler_svc.core.suspects import num_in_flight


class LawBroken(AssertionError):
    """A law does not hold. `law` names it; the message shows the numbers."""

    def __init__(self, law: str, detail: str) -> None:
        super().__init__(f"{law}: {detail}")
        self.law = law


def check(scheduler: Scheduler) -> None:
    """Raises LawBroken, naming the first law that does not hold."""
    for replica in scheduler.replicas.values():
        _check_blocks(replica)
        _check_prefix_cache(replica)
        _check_host_tier(replica)
        _check_slots(replica)
        _check_tables(replica)
        _check_unanswered(replica)
    _check_places(scheduler)


def _demand(holds: bool, law: str, detail: str) -> None:
    if not holds:
        raise LawBroken(law, detail)


def _check_blocks(replica: Replica) -> None:
    """Each block is idle without references or has as many as tables hold; idle + used = total."""
    pool = replica.kv.pool
    held = Counter(block for sequence in replica.rows.running for block in sequence.block_ids)
    for block in range(pool.num_blocks):
        detail = f"block {block} of {replica.spec.name!r}: {pool.holds[block]} references, {held[block]} in tables"
        _demand(pool.holds[block] == held[block], "references equal tables", detail)
    idle = pool.idle_blocks()
    _demand(len(idle) == len(set(idle)) == pool.num_idle, "idle blocks are listed once", f"{len(idle)} listed")
    _demand(all(pool.holds[block] == 0 for block in idle), "idle blocks have no references", str(idle))
    num_used = sum(1 for holds in pool.holds if holds)
    detail = f"{pool.num_idle} idle and {num_used} used of {pool.num_blocks}"
    _demand(pool.num_idle + num_used == pool.num_blocks, "idle + used = total", detail)


def _check_prefix_cache(replica: Replica) -> None:
    """Only full, answered blocks are findable, by the digest of what they hold; kept ones are the findable idle."""
    kv = replica.kv
    findable = set(kv.cache.blocks)
    kept = set(kv.pool.kept_blocks())
    idle_findable = {block for block in findable if kv.pool.holds[block] == 0}
    _demand(kept == idle_findable, "kept blocks are the findable idle ones", f"{kept} kept, {idle_findable} findable")
    for block in findable:
        digest = kv.cache.digest_of(block)
        found = None if digest is None else kv.cache.find(digest)
        _demand(found == block, "a digest names its block", f"block {block}, its digest finds {found}")
    for sequence in replica.rows.running:
        for index, block in enumerate(sequence.block_ids):
            digest = kv.cache.digest_of(block)
            if digest is None:
                continue
            full = index < sequence.num_hashed_blocks and (index + 1) * kv.block_size <= len(sequence.token_ids)
            detail = f"block {block} is number {index} of sequence {sequence.sequence_id}"
            _demand(full and sequence.chain is not None, "only full blocks are findable", detail)
            if sequence.chain is not None:
                same = kv.chain_of(sequence).digest(sequence.token_ids, index) == digest
                _demand(same, "a findable block never changes", detail)


def _check_host_tier(replica: Replica) -> None:
    """Host blocks are idle between plans, findable by the digest they hold or blank; idle ones are listed once."""
    host = replica.kv.host
    if host is None:
        return
    name = f"host tier of {replica.spec.name!r}"
    _demand(host.held_blocks() == [] and not any(host.pool.holds), "nothing is held between plans", name)
    idle = host.pool.idle_blocks()
    lengths = f"{name}: {len(idle)} listed of {host.pool.num_blocks}"
    _demand(sorted(idle) == list(range(host.pool.num_blocks)), "idle + used = total", lengths)
    findable = set(host.cache.blocks)
    _demand(set(host.pool.kept_blocks()) == findable, "kept blocks are the findable idle ones", f"{name}: {findable}")
    for block in findable:
        digest = host.cache.digest_of(block)
        found = None if digest is None else host.cache.find(digest)
        _demand(found == block, "a digest names its block", f"{name}: block {block}, its digest finds {found}")
    pending = host.pending_demotions()
    _demand(pending <= findable, "only findable blocks are demoted to", f"{name}: {pending}")


def _check_slots(replica: Replica) -> None:
    """Every slot is free or one sequence's."""
    rows = replica.rows
    slots = sorted([*rows.free_slots, *(sequence.slot for sequence in rows.running)])
    _demand(slots == list(range(replica.spec.num_slots)), "slots are unique", f"{slots} of {replica.spec.num_slots}")
    kept, rows.load_tokens = rows.load_tokens, None
    load, rows.load_tokens = replica.load_tokens, kept
    _demand(kept in (None, load), "the load is what rows and plans say", f"{kept} kept, {load} counted")
    num_most = sum(replica.kv.num_blocks_for(rows.end_of(sequence)) for sequence in rows.running)
    _demand(num_most == rows.num_most_blocks, "most blocks add up", f"{rows.num_most_blocks} kept, {num_most} counted")
    _demand(len(rows.running) <= replica.max_running, "running is bounded", f"{len(rows.running)} run")
    ranks = [sequence.rank for sequence in rows.running]
    _demand(ranks == sorted(ranks), "running is by rank", str(ranks))
    priorities = Counter(sequence.priority for sequence in rows.running)
    _demand(rows.priorities == priorities, "running priorities are counted", str(rows.priorities))
    _demand(rows.in_flight.check(rows.running), "leaders run and are listed by their next block", replica.spec.name)
    suspects = [sequence for sequence in rows.running if sequence.suspect_bound is not None]
    _demand(set(rows.suspects) == set(suspects), "running suspects are listed", str(len(suspects)))
    for sequence in suspects:
        num_rows = num_in_flight(rows)
        bounded = sequence.suspect_bound is not None and num_rows <= sequence.suspect_bound
        _demand(bounded, "suspects run in small groups", f"{num_rows} rows beside sequence {sequence.sequence_id}")


def _check_tables(replica: Replica) -> None:
    """Each running sequence is steady, filling, or waits for its last answer; its table covers what is planned."""
    rows, steady = replica.rows, replica.rows.steady
    lengths = (len(steady.sequences), len(steady.slots), len(steady.starts))
    _demand(len(set(lengths)) == 1, "steady lists are parallel", str(lengths))
    for row, sequence in enumerate(steady.sequences):
        agrees = sequence.steady_row == row and sequence.slot == steady.slots[row]
        _demand(agrees, "steady rows know their place", f"row {row}, sequence {sequence.sequence_id}")
    for sequence in rows.running:
        name = f"sequence {sequence.sequence_id}"
        is_steady, is_filling = sequence.steady_row is not None, sequence in rows.filling
        _demand(not (is_steady and is_filling), "a row has one place", name)
        planned = steady.start_of(sequence) if is_steady else sequence.num_planned_tokens
        known = len(sequence.token_ids) + _num_pending(replica, sequence)
        if is_filling:
            _demand(planned < known, "a filling row has tokens to compute", f"{name}: {planned} of {known}")
        elif is_steady:
            _demand(planned == known - 1, "a steady row has one token to compute", f"{name}: {planned} of {known}")
        else:
            _demand(_num_rows(replica, sequence) > 0, "a row without work waits for an answer", name)
        num_blocks = len(sequence.block_ids)
        _demand(
            num_blocks >= replica.kv.num_blocks_for(planned), "tables cover what is planned", f"{name}: {num_blocks}"
        )


def _check_unanswered(replica: Replica) -> None:
    """Plans in flight are bounded and in order; a settling sequence counts exactly its rows in them."""
    plans = replica.rows.unanswered
    _demand(len(plans) <= replica.max_unanswered_plans, "plans in flight are bounded", f"{len(plans)}")
    steps = [plan.step for plan in plans]
    _demand(steps == sorted(set(steps)), "plans are in order", str(steps))
    for plan in plans:
        for row, sequence in enumerate(plan.rows):
            runs_here = sequence.state is State.RUNNING and sequence.replica_id == replica.spec.replica_id
            detail = f"step {plan.step}, row {row}, sequence {sequence.sequence_id}"
            _demand(runs_here == (row not in plan.departed), "rows in flight run or departed", detail)
            if sequence.state is State.SETTLING:
                num_rows = _num_rows(replica, sequence)
                _demand(num_rows == sequence.num_unanswered_rows, "settling counts its rows", detail)


def _check_places(scheduler: Scheduler) -> None:
    """Each live sequence is in exactly one place, and no other is anywhere."""
    room = scheduler.room
    queued = [sequence for queue in room.queues.values() for sequence in queue]
    _demand(len(queued) == len(set(queued)), "a sequence waits once", "")
    waiting = {*queued, *room.leaders}
    _demand(len(waiting) == len(queued) + len(room.leaders), "followers wait beside the queue", "")
    _check_followers(scheduler)
    _check_tenants(scheduler, waiting)
    running = [sequence for replica in scheduler.replicas.values() for sequence in replica.rows.running]
    _demand(len(running) == len(set(running)), "a sequence runs once", "")
    for sequence in scheduler.sequences.values():
        name = f"sequence {sequence.sequence_id} is {sequence.state.value}"
        _demand(sequence.state is not State.ENDED, "ended ones are forgotten", name)
        _demand((sequence in waiting) == (sequence.state is State.WAITING), "waiting ones are queued", name)
        _demand((sequence in running) == (sequence.state is State.RUNNING), "running ones have a replica", name)
        _demand(bool(sequence.block_ids) == (sequence.state is State.RUNNING), "only running ones hold blocks", name)
    _demand(waiting <= set(scheduler.sequences.values()), "the queue holds live ones", "")
    _demand(set(running) <= set(scheduler.sequences.values()), "slots hold live ones", "")
    _demand(scheduler.room.num_waiting == len(waiting), "waiting is counted", f"{scheduler.room.num_waiting}")
    _demand(scheduler.admissions.placement.check(waiting), "promises are of waiting ones and add up", "")
    _demand(
        scheduler.room.group_places.check(), "places kept for groups add up", f"{scheduler.room.group_places.total}"
    )
    num_tokens = sum(len(sequence.token_ids) for sequence in waiting)
    _demand(scheduler.room.num_tokens == num_tokens, "waiting tokens are counted", f"{scheduler.room.num_tokens}")
    kept = scheduler.ledger.history.check(set(scheduler.sequences))
    _demand(kept, "history is of live ones or bounded", f"{len(scheduler.sequences)} live")


def _check_followers(scheduler: Scheduler) -> None:
    """Each follower has one leader, which runs and has yet to make findable what the follower waits for."""
    room = scheduler.room
    pairs = {follower: leader for leader, followers in room.followers.items() for follower in followers}
    _demand(pairs == room.leaders, "a follower has one leader", f"{len(pairs)} pairs, {len(room.leaders)} followers")
    for follower, leader in pairs.items():
        name = f"sequence {follower.sequence_id} follows {leader.sequence_id}, which is {leader.state.value}"
        runs = leader.state is State.RUNNING and leader.sequence_id in scheduler.sequences
        _demand(runs, "leaders run", name)
        more = room.followers[leader][follower] > leader.num_hashed_blocks
        _demand(more, "followers wait for what is not there", name)
        _demand(scheduler.order.may_follow(follower, leader), "leaders are not worse than followers", name)


def _check_tenants(scheduler: Scheduler, waiting: set[Sequence]) -> None:
    """What waits is counted by tenant."""
    counted: dict[str, list[int]] = {}
    for sequence in waiting:
        own = counted.setdefault(sequence.request.tenant, [0, 0])
        own[0] += 1
        own[1] += len(sequence.token_ids)
    _demand(counted == scheduler.room.tenants, "tenants are counted", f"{scheduler.room.tenants}, not {counted}")


def _num_rows(replica: Replica, sequence: Sequence) -> int:
    return sum(plan.rows.count(sequence) for plan in replica.rows.unanswered)


def _num_pending(replica: Replica, sequence: Sequence) -> int:
    """Tokens that unanswered plans sample for the sequence."""
    rows = ((plan, plan.row_of(sequence)) for plan in replica.rows.unanswered)
    return sum(plan.num_to_sample[row] for plan, row in rows if row is not None)
