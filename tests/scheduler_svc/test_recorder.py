"""The flight recorder and replay: the same decisions from what was recorded, without a token of any prompt."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from random import Random

import pytest

from octavo.cost_model import CostModel
from scheduler_svc.contents import Contents
from scheduler_svc.core.limits import CoreLimits, SchedulingPolicy
from scheduler_svc.core.plan import Limit, Planned, StepPlan, StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import FinishReason, RefusalReason, Refused, ReplicaSpec, Request, ResultMismatch
from scheduler_svc.decisions import Decisions
from scheduler_svc.recorded import Pseudonyms, result_record
from scheduler_svc.recorder import Recorder
from scheduler_svc.recording import RecordingError, from_fields, read, to_fields
from scheduler_svc.replay import limits_of, replay, request_of
from scheduler_svc.simulation import Arrival, Run, Simulation, Stay

SALT = b"0123456789abcdef"
MS = 1_000_000
SECRET = 0x5EC4E7  # a token id that no hash or count in these recordings equals
SYSTEM_PROMPTS = [[SECRET + n * 100 + position for position in range(24)] for n in range(3)]
COSTS = CostModel(2000, step_ms=5, row_us=100, kv_token_ns=1000)


def spec(replica_id: int, **changes: object) -> ReplicaSpec:
    base = ReplicaSpec(
        replica_id=replica_id,
        name=f"replica-{replica_id}",
        incarnation=replica_id,
        model="m",
        fingerprint="f",
        max_model_len=160,
        block_size=4,
        num_device_blocks=40,
        num_slots=6,
        max_step_tokens=32,
        num_host_blocks=20,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def workload(seed: int, num: int = 60, model: str = "m") -> list[Arrival]:
    """Prompts that share beginnings, of several tenants; some continue an earlier answer, some are cancelled."""
    random, arrivals, at_ns = Random(seed), list[Arrival](), 0
    for sequence_id in range(1, num + 1):
        at_ns += random.randint(0, 30) * MS
        prompt = [*random.choice(SYSTEM_PROMPTS), *(random.randint(1, 2**32 - 1) for _ in range(random.randint(1, 20)))]
        if arrivals and random.random() < 0.3:
            earlier = random.choice(arrivals).request
            answer = [token_of(earlier.sequence_id, len(earlier.prompt_token_ids) + n) for n in range(8)]
            prompt = [*earlier.prompt_token_ids, *answer, 7][:120]
        request = Request(
            sequence_id=sequence_id,
            model=model,
            prompt_token_ids=prompt,
            max_tokens=random.randint(1, 30),
            tenant=random.choice(["", "alice", "bob"]),
            cache_salt=random.choice(["", "", "salted"]),
            priority=random.choice([0, 0, 0, -1, 3]),
            deadline_ns=random.choice([None, None, 900 * MS]),
            queue_events=random.random() < 0.5,
        )
        cancel_at_ns = at_ns + random.randint(0, 500) * MS if random.random() < 0.1 else None
        arrivals.append(Arrival(at_ns, request, random.randint(1, 40), cancel_at_ns))
    return arrivals


def token_of(sequence_id: int, position: int) -> int:
    """What the model says: by position, so that answers share blocks where prompts do."""
    return (position * 977 + sequence_id % 3) & 0xFFFF


STAYS = [Stay(spec(1)), Stay(spec(2), 200 * MS, 700 * MS), Stay(spec(3), 600 * MS)]


def recorded(
    seed: int,
    limits: CoreLimits | None = None,
    stays: list[Stay] = STAYS,
    *,
    num: int = 60,
    max_bytes: int = 1 << 24,
    record_tokens: bool = False,
) -> tuple[bytes, Run, Recorder]:
    core = Scheduler(limits or CoreLimits(max_waiting=20))
    recorder = Recorder(core, salt=SALT, max_bytes=max_bytes, record_tokens=record_tokens)
    run = Simulation(recorder, COSTS, token_of).run(workload(seed, num), stays)
    return b"".join(recorder.dump(run.end_ns)), run, recorder


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
@pytest.mark.parametrize("seed", range(6))
def test_a_recorded_run_replays_identically(seed: int, policy: SchedulingPolicy) -> None:
    limits = CoreLimits(max_waiting=20, policy=policy, tenant_weights={"alice": 2.0})
    data, run, recorder = recorded(seed, limits)
    assert run.is_complete
    again = replay(read(data))
    assert again.difference is None
    assert again.num_records > 200
    assert again.statistics.replicas == recorder.statistics().replicas
    assert again.sequences.keys() == run.times.keys()
    for sequence_id, times in again.sequences.items():
        expected = run.times[sequence_id]
        assert replace(times, tenant="") == replace(expected, tenant=""), sequence_id
    assert sum(times.num_cached_tokens for times in run.times.values()) > 0


def test_a_run_with_token_ids_replays_too() -> None:
    data, _, _ = recorded(1, record_tokens=True)
    found = read(data)
    assert found.header.has_tokens
    assert any(SECRET in record.submit.token_ids for record in found.records)
    assert replay(found).difference is None


def test_a_run_without_prefix_caching_replays_and_hashes_nothing() -> None:
    data, _, _ = recorded(2, CoreLimits(enable_prefix_caching=False))
    found = read(data)
    assert not any(record.HasField("content") for record in found.records)
    assert replay(found).difference is None


def test_updates_drains_resets_and_ticks_are_inputs_too() -> None:
    recorder = Recorder(Scheduler(), salt=SALT, max_bytes=1 << 20)
    simulation = Simulation(recorder, COSTS, token_of)
    acts: list[Callable[[int], object]] = [
        lambda now: recorder.update(1, now, priority=-5, deadline_ns=10**10),
        lambda now: recorder.drain(1, now),
        lambda now: recorder.reset_prefix_cache(),
        lambda now: recorder.tick(now),
    ]
    for index, act in enumerate(acts):
        simulation._at(20 * MS * (index + 1), act)  # type: ignore[arg-type]
    run = simulation.run(
        [replace(arrival, request=replace(arrival.request, max_tokens=30)) for arrival in workload(3, num=10)],
        [Stay(spec(1)), Stay(spec(2))],
    )
    found = read(b"".join(recorder.dump(run.end_ns)))
    kinds = {record.WhichOneof("input") for record in found.records}
    assert kinds >= {"update", "drain", "reset", "tick", "attach", "submit", "plan", "complete", "content"}
    again = replay(found)
    assert again.difference is None
    num_tokens = sum(step.num_prefill_tokens + step.num_decode_rows for step in again.steps)
    assert num_tokens == sum(replica.num_computed_tokens for replica in recorder.statistics().replicas)
    times = [record.now_ns for record in found.records]
    assert times == sorted(times)
    contents = Counter(record.content.sequence_id for record in found.records if record.HasField("content"))
    assert set(contents.values()) == {1}, "what a sequence held is told once"


def test_a_result_that_answered_no_plan_is_recorded_as_refused() -> None:
    recorder = Recorder(Scheduler(), salt=SALT, max_bytes=1 << 20)
    recorder.attach(spec(1), 0)
    recorder.submit(Request(1, "m", [1, 2, 3], 2), 0)
    recorder.plan(1, 1)
    with pytest.raises(ResultMismatch):
        recorder.complete(1, StepResult(1, 1, [1, 1], [5, 6], {}), 2)
    recorder.detach(1, 3)
    assert replay(read(b"".join(recorder.dump(4)))).difference is None


def test_a_request_survives_the_file_but_for_the_names_in_it() -> None:
    request = Request(
        sequence_id=7,
        model="m",
        prompt_token_ids=array("I", [1, 2, 3, 4]),
        max_tokens=9,
        prior_token_ids=array("I", [5, 6]),
        prompt_logprobs_start=3,
        adapter="a",
        tenant="alice",
        cache_salt="salted",
        priority=-2,
        deadline_ns=10**9,
        age_ns=5,
        group_id="family",
        group_size=2,
        router_id=4,
        attempt=2,
        crash_group_sizes=(3, 1),
        queue_events=True,
    )
    recorded = Pseudonyms(SALT).request(request, has_tokens=True)
    again = request_of(recorded, array("I", recorded.token_ids))
    changed = {field.name for field in fields(Request) if getattr(again, field.name) != getattr(request, field.name)}
    assert changed == {"tenant", "cache_salt", "group_id"}
    assert all(getattr(again, name) for name in changed)


def test_a_result_survives_the_file_but_for_its_tokens() -> None:
    finishes = {2: FinishReason.LENGTH}
    found = result_record(3, StepResult(1, 5, [1, 0, 1], [8, 9], finishes, (0,), 70, 6), has_tokens=False)
    assert (found.replica_id, found.step, found.num_rows, list(found.silent_rows)) == (3, 5, 3, [1])
    assert (list(found.token_ids), list(found.finished_rows), list(found.finish_reasons)) == ([], [2], [3])
    assert (list(found.undelivered_rows), found.duration_ns, found.copy_ns) == ([0], 70, 6)


def test_the_sum_tells_answers_apart() -> None:
    def step(counts: list[int], starts: list[int]) -> StepPlan:
        return StepPlan(1, 1, [], [], [], [], [], [0, 1], starts, counts)

    answers: list[Callable[[Decisions], None]] = [
        lambda sums: sums.add_refusal(Refused(RefusalReason.QUEUE_FULL, "f", 1, 1, "", 10)),
        lambda sums: sums.add_refusal(Refused(RefusalReason.QUEUE_FULL, "f", 1, 1, "", 11)),
        lambda sums: sums.add_refusal(Refused(RefusalReason.DEADLINE, "f", 1, 1, "", 10)),
        lambda sums: sums.add_planned(1, Planned(None, [], Limit.SLOTS)),
        lambda sums: sums.add_planned(1, Planned(None, [], Limit.BLOCKS)),
        lambda sums: sums.add_planned(2, Planned(None, [], Limit.SLOTS)),
        lambda sums: sums.add_planned(1, Planned(step([1, 3], [4, 0]), [], Limit.SLOTS)),
        lambda sums: sums.add_planned(1, Planned(step([3, 1], [4, 0]), [], Limit.SLOTS)),
        lambda sums: sums.add_planned(1, Planned(step([3, 1], [0, 4]), [], Limit.SLOTS)),
    ]
    values = set[int]()
    for add in answers:
        sums = Decisions()
        add(sums)
        values.add(sums.value)
    assert len(values) == len(answers)


def test_replicas_are_named_once_whenever_they_came_and_went() -> None:
    recorder = Recorder(Scheduler(), salt=SALT, max_bytes=1 << 20)

    def named() -> list[str]:
        return [replica.fields["replica_id"] for replica in read(b"".join(recorder.dump(0))).header.replicas]

    recorder.attach(spec(1), 0)
    assert named() == []  # its coming is among the records
    recorder.forget()
    recorder.attach(spec(2), 0)
    assert named() == ["1"]
    recorder.detach(1, 0)
    assert named() == ["1"]
    recorder.forget()
    assert named() == ["2"]
    recorder.detach(2, 0)
    assert named() == ["2"]  # its going is the first record


def test_groups_in_a_state_go_by_other_names_and_come_in_whole() -> None:
    recorder = Recorder(Scheduler(CoreLimits(max_waiting=3)), salt=SALT, max_bytes=1 << 20)
    recorder.attach(spec(1), 0)
    member = Request(1, "m", [1, 2], 5, tenant="alice", group_id="family", group_size=3)
    recorder.submit(member, 0)
    recorder.forget()
    recorder.submit(replace(member, sequence_id=2), 1)
    with pytest.raises(Refused):
        recorder.submit(Request(9, "m", [1, 2], 5), 1)
    recorder.submit(replace(member, sequence_id=3), 1)
    data = b"".join(recorder.dump(2))
    assert replay(read(data)).difference is None
    assert b"family" not in data
    assert b"alice" not in data


def test_a_dump_in_the_middle_holds_what_is_known_of_live_sequences() -> None:
    recorder = Recorder(Scheduler(), salt=SALT, max_bytes=1 << 24)
    run = Simulation(recorder, COSTS, token_of).run(workload(4), [Stay(spec(1))], until_ns=300 * MS)
    assert not run.is_complete
    assert replay(read(b"".join(recorder.dump(run.end_ns)))).difference is None


def test_a_larger_budget_that_nobody_fills_changes_no_decision() -> None:
    """The recording is replayed with replicas, and limits, that allow for more tokens in a step."""
    stays = [Stay(spec(1, max_step_tokens=4096)), Stay(spec(2, max_step_tokens=4096), 200 * MS)]
    data, run, _ = recorded(3, CoreLimits(max_num_batched_tokens=2048), stays)
    assert run.is_complete
    for budget, is_filled in ((65_536, False), (2_047, False), (16, True)):
        found = read(data)
        found.header.limits["max_num_batched_tokens"] = str(budget)
        for record in found.records:
            if record.HasField("attach"):
                record.attach.fields["max_step_tokens"] = str(max(budget, 4096))
        assert (replay(found).difference is not None) is is_filled, budget


def test_nothing_of_prompts_tenants_and_salts_is_in_a_recording() -> None:
    data, _, _ = recorded(5)
    for record in read(data).records:
        assert not record.submit.token_ids
        assert not record.complete.token_ids
        assert record.submit.tenant not in ("alice", "bob")
        assert record.submit.cache_salt != "salted"
    assert b"alice" not in data
    assert b"salted" not in data.replace(b"unsalted", b"")
    for token_id in SYSTEM_PROMPTS[0]:
        assert token_id.to_bytes(4, "little") not in data


def test_hashes_of_another_salt_are_others() -> None:
    first, _, _ = recorded(6)
    core = Scheduler(CoreLimits(max_waiting=20))
    other = Recorder(core, salt=b"another salt....", max_bytes=1 << 24)
    run = Simulation(other, COSTS, token_of).run(workload(6), STAYS)
    one, two = read(first), read(b"".join(other.dump(run.end_ns)))
    assert one.header.salt_id != two.header.salt_id
    hashes = [{each for r in found.records for each in r.content.block_hashes} for found in (one, two)]
    assert hashes[0]
    assert hashes[0].isdisjoint(hashes[1])
    assert replay(two).difference is None


def test_the_first_decision_that_differs_is_named() -> None:
    data, _, _ = recorded(7)
    found = read(data)
    index = next(i for i, record in enumerate(found.records) if i > 150 and record.HasField("plan"))
    found.records[index].decisions ^= 1
    difference = replay(found).difference
    assert difference is not None
    assert (difference.index, difference.input) == (index, "plan")
    found.header.limits["max_unanswered_plans"] = "1"
    changed = replay(found).difference
    assert changed is not None
    assert changed.index < index


@pytest.mark.parametrize(("seed", "policy"), list(enumerate(SchedulingPolicy)))
def test_a_ring_that_forgot_its_beginning_replays_from_the_state_after_it(seed: int, policy: SchedulingPolicy) -> None:
    limits = CoreLimits(max_waiting=20, policy=policy, tenant_weights={"alice": 2.0})
    whole, _, _ = recorded(seed, limits, num=240)
    data, _, recorder = recorded(seed, limits, num=240, max_bytes=300_000)
    found, complete = read(data), read(whole)
    assert found.header.num_dropped_records > 500
    assert len(found.header.requests) > 3
    assert found.records == complete.records[-len(found.records) :]
    assert found.header.decisions == complete.records[-len(found.records) - 1].decisions
    again = replay(found)
    assert again.difference is None
    assert again.num_records > 300
    ours, theirs = again.statistics, recorder.statistics()
    assert ours.replicas == theirs.replicas
    assert sorted(each.num_served_tokens for each in ours.tenants.values()) == sorted(
        each.num_served_tokens for each in theirs.tenants.values()
    )
    found.records[-1].decisions ^= 1
    found.records[len(found.records) // 2].decisions ^= 1
    assert replay(found).difference is not None


def test_a_dump_at_any_moment_replays() -> None:
    """The ring forgets again and again while dumps are written."""
    recorder = Recorder(Scheduler(CoreLimits(max_waiting=20)), salt=SALT, max_bytes=300_000)
    simulation = Simulation(recorder, COSTS, token_of)
    dumps: list[bytes] = []
    for index in range(12):
        simulation._at((1000 + index * 250) * MS, lambda now: dumps.append(b"".join(recorder.dump(now))))
    simulation.run(workload(2, num=240), STAYS)
    found = [read(data) for data in dumps]
    assert [replay(each).difference for each in found] == [None] * 12
    assert len({each.header.num_dropped_records for each in found}) > 1


def test_nothing_of_prompts_tenants_and_salts_is_in_a_state() -> None:
    limits = CoreLimits(max_waiting=20, policy=SchedulingPolicy.FAIR, tenant_weights={"alice": 2.0})
    data, _, _ = recorded(5, limits, num=240, max_bytes=300_000)
    state = read(data).header.state
    assert len(state) > 10_000
    for secret in ("alice", "bob", "salted", str(SECRET), "g-"):
        assert secret not in state
    for token_id in SYSTEM_PROMPTS[0]:
        assert str(token_id) not in state


def test_a_ring_too_small_for_the_state_says_so() -> None:
    found = read(recorded(8, max_bytes=20_000)[0])
    assert found.header.num_dropped_records > 0
    with pytest.raises(RecordingError, match=r"state of about \d+ bytes takes more than half.*--flight-recorder-size"):
        replay(found)


def test_a_state_of_another_version_is_refused() -> None:
    found = read(recorded(8, num=240, max_bytes=300_000)[0])
    original = found.header.state
    for old, new in (("Scheduler", "Sequence"), ('"enum"', '"mood"'), ('"State"', '"Mood"'), ('"slot"', '"place"')):
        found.header.state = original.replace(old, new)
        assert found.header.state != original
        with pytest.raises(RecordingError, match="the state that it begins with"):
            replay(found)


def test_replicas_of_two_block_sizes_for_one_model_replay_too() -> None:
    stays = [Stay(spec(1)), Stay(spec(2, block_size=8), 100 * MS), Stay(spec(3, fingerprint="g"), 150 * MS)]
    for max_bytes in (1 << 24, 300_000):
        found = read(recorded(9, stays=stays, num=240, max_bytes=max_bytes)[0])
        assert replay(found).difference is None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: b"PK" + data, "it is no recording"),
        (lambda data: data[:-3], "cut off"),
        (lambda data: data + b"\xff\xff\xff\xff\xff\xff", "damaged"),
        (lambda data: data[:17] + b"\x02\x08\x09" + data[17:], "its version is 9"),
        (lambda data: data + b"\x02\x1a\x7f", "cannot be read"),
    ],
)
def test_a_damaged_file_is_refused(damage: Callable[[bytes], bytes], words: str) -> None:
    data, _, _ = recorded(10)
    with pytest.raises(RecordingError, match=words):
        read(damage(data))


def test_limits_survive_the_file_and_unknown_ones_are_refused() -> None:
    limits = CoreLimits(policy=SchedulingPolicy.PRIORITY, tenant_weights={"": 3.0}, max_num_seqs=7)
    data, _, _ = recorded(11, limits)
    found = read(data)
    assert limits_of(found) == limits
    assert from_fields(ReplicaSpec, to_fields(spec(4))) == spec(4)
    found.header.limits["max_dreams"] = "3"
    with pytest.raises(RecordingError, match="no field max_dreams"):
        limits_of(found)
    with pytest.raises(RecordingError, match="max_waiting is 0"):
        from_fields(CoreLimits, {"max_waiting": "0"})


def test_made_up_tokens_are_equal_exactly_where_beginnings_are() -> None:
    recorder = Recorder(Scheduler(), salt=SALT, max_bytes=1 << 20)
    recorder.attach(spec(1), 0)
    prompts = [
        [1, 2, 3, 4, 5, 6, 7, 8, 9],
        [1, 2, 3, 4, 5, 6, 7, 8, 1],
        [1, 2, 3, 4, 9, 6, 7, 8, 7],
        [9, 2, 3, 4, 5, 6, 7, 8, 7],
    ]
    for sequence_id, prompt in enumerate(prompts, 1):
        recorder.submit(Request(sequence_id, "m", prompt, 5), 0)
    recorder.plan(1, 0)
    contents = Contents(read(b"".join(recorder.dump(1))).records)
    blocks = [[contents.tokens(each, 0, 4), contents.tokens(each, 4, 8)] for each in (1, 2, 3, 4)]
    assert blocks[0] == blocks[1]
    assert blocks[0][0] == blocks[2][0]
    assert blocks[0][1] != blocks[2][1]
    # The last differs from the first in its first block alone; equal tokens after another beginning are not equal.
    assert blocks[3][0] != blocks[0][0]
    assert blocks[3][1] != blocks[0][1]
    assert contents.tokens(1, 8, 9) != contents.tokens(2, 8, 9)
