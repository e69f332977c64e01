"""Steps that are launched before the last one is settled, and decode steps as graphs: the answers are those of the CPU.

The device is a fake that computes at once and says so when it is told to; the order of what it was asked is looked at.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.internal.v1 import types_pb2, worker_pb2
from tests.fakes.eager_device import EagerDevice, PaddedReference
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE
from tests.worker.harness import Driver, RunnerShape, answer, build_runner, sampling
from tests.worker.test_runner_plans import admission, plan
from worker_svc.batch import build_step_input
from worker_svc.decode_graphs import graph_sizes
from worker_svc.device.staging import Downloads, Uploads
from worker_svc.rows import PlanError, RowLimits, RowTable
from worker_svc.runner import Runner
from worker_svc.step_inputs import DeviceInputs

SHAPE = RunnerShape(vocab_size=TINY_VOCAB_SIZE, num_host_blocks=8)


@pytest.fixture
def device() -> EagerDevice:
    return EagerDevice()


def ahead_runner(directory: Path, device: EagerDevice, graph_rows: tuple[int, ...] = ()) -> Runner:
    shape = replace(SHAPE, device=device, graph_rows=graph_rows)
    runner = build_runner(directory, shape, backend=PaddedReference())
    runner.capture_graphs()
    return runner


MIXTURE = (
    ([7, 8, 9], {"max_tokens": 9}),
    (list(range(30, 55)), {"max_tokens": 12, "temperature": 0.9, "seed": 5, "top_k": 20}),
    ([4] * 9, {"max_tokens": 7, "num_logprobs": 2}),
    ([100, 3], {"max_tokens": 10, "presence_penalty": 0.7, "temperature": 0.5, "seed": 1}),
    ([60, 61, 62], {"max_tokens": 6, "min_tokens": 4, "end_token_ids": list(range(128))}),
    ([9, 9, 8], {"max_tokens": 5, "num_prompt_logprobs": 1}),
)


@pytest.mark.parametrize("graph_rows", [(), (1, 2, 4, 8)], ids=["eager", "graphs"])
def test_answers_do_not_depend_on_the_device(
    tiny_runner: Runner, tiny_directory: Path, graph_rows: tuple[int, ...]
) -> None:
    answers = []
    for runner in (tiny_runner, ahead_runner(tiny_directory, EagerDevice(), graph_rows)):
        runner.reset()
        driver = Driver(runner)
        sequences = [driver.add(tokens, sampling(**params)) for tokens, params in MIXTURE]
        driver.finish(*sequences[:3], chunk=10)
        driver.preempt(sequences[0]) if not sequences[0].finish else None
        driver.finish(*sequences, chunk=5)
        answers.append([answer(sequence) for sequence in sequences])
    assert answers[0] == answers[1]


@pytest.mark.parametrize("graph_rows", [(), (4,)], ids=["eager", "graphs"])
def test_a_step_begins_with_tokens_that_only_the_device_knows(
    tiny_runner: Runner, tiny_directory: Path, device: EagerDevice, graph_rows: tuple[int, ...]
) -> None:
    plans = [
        plan(1, [(0, 0, 3), (1, 0, 3)], admissions=[admission(), admission(slot=1)]),
        plan(2, [(0, 3, 1), (1, 3, 1)], append_slots=[0], append_counts=[1], append_block_ids=[30]),
        plan(3, [(1, 4, 1), (0, 4, 1)]),
    ]
    tiny_runner.reset()
    expected = [tiny_runner.run(each).sampled[0].token_ids.tolist() for each in plans]
    runner = ahead_runner(tiny_directory, device, graph_rows)
    flights = [runner.launch(each) for each in plans[:2]]
    assert [flight.is_done() for flight in flights] == [False, False]
    assert not any(event.startswith("wait") for event in device.events)
    flights.append(runner.launch(plans[2]))
    # No more than two steps are in flight: the first was settled for the third.
    assert [flight.is_done() for flight in flights] == [True, False, False]
    assert [flight.result().sampled[0].token_ids.tolist() for flight in flights] == expected
    assert device.events.count("replay 1") == (2 if graph_rows else 0)


def test_no_step_is_settled_before_it_is_computed(tiny_directory: Path, device: EagerDevice) -> None:
    """Not even one that samples nothing: its uploads may still be read."""
    runner = ahead_runner(tiny_directory, device)
    flights = [runner.launch(plan(1, [(0, 0, 1)], admissions=[admission()]))]
    flights += [runner.launch(plan(step, [(0, step - 1, 1)])) for step in (2, 3)]
    assert device.num_reached == 1
    assert [flight.is_done() for flight in flights] == [True, False, False]
    runner.reset()
    assert device.num_reached == 3
    assert runner.run(plan(1, [(0, 0, 3)], admissions=[admission()])).sampled != ()


def test_a_row_that_ended_meanwhile_has_sampled_for_nothing(tiny_directory: Path, device: EagerDevice) -> None:
    runner = ahead_runner(tiny_directory, device)
    first = runner.run(plan(1, [(0, 0, 3)], admissions=[admission()])).sampled[0].token_ids.tolist()
    runner.reset()
    ending = admission(sampling=sampling(max_tokens=4, end_token_ids=first))
    flights = [runner.launch(plan(1, [(0, 0, 3)], admissions=[ending])), runner.launch(plan(2, [(0, 3, 1)]))]
    outcomes = [flight.result() for flight in flights]
    assert outcomes[0].sampled[0].finish_reasons.tolist() == [types_pb2.FINISH_REASON_END_TOKEN]
    assert (outcomes[1].sampled, outcomes[1].num_plan_rows) == ((), 1)
    assert runner.num_live_rows == 0


def test_a_row_that_ends_by_its_length_is_not_run_again(tiny_directory: Path, device: EagerDevice) -> None:
    runner = ahead_runner(tiny_directory, device)
    one = admission(sampling=sampling(max_tokens=1))
    flights = [runner.launch(plan(1, [(0, 0, 3)], admissions=[one])), runner.launch(plan(2, [(0, 3, 1)]))]
    assert [len(flight.result().sampled) for flight in flights] == [1, 0]


def test_a_slot_that_is_taken_over_is_settled_first(tiny_directory: Path, device: EagerDevice) -> None:
    runner = ahead_runner(tiny_directory, device)
    flight = runner.launch(plan(1, [(0, 0, 3)], admissions=[admission()]))
    again = admission(token_ids=[8, 9, 10], block_ids=[20, 21])
    other = runner.launch(plan(2, [(0, 0, 3)], released_slots=[0], admissions=[again]))
    assert flight.is_done()
    found = other.result().sampled[0].token_ids.tolist()
    runner.reset()
    assert runner.run(plan(1, [(0, 0, 3)], admissions=[again])).sampled[0].token_ids.tolist() == found


def test_rows_whose_past_decides_wait_for_it(tiny_directory: Path, device: EagerDevice) -> None:
    runner = ahead_runner(tiny_directory, device)
    penalised = admission(sampling=sampling(max_tokens=4, repetition_penalty=1.5))
    flight = runner.launch(plan(1, [(0, 0, 3)], admissions=[penalised]))
    assert not flight.is_done()
    runner.launch(plan(2, [(0, 3, 1)]))
    assert flight.is_done()


def test_steps_wait_for_the_copies_of_their_own_blocks_alone(tiny_directory: Path, device: EagerDevice) -> None:
    runner = ahead_runner(tiny_directory, device)
    runner.run(plan(1, [(0, 0, 3), (1, 0, 3)], admissions=[admission(), admission(slot=1)]))
    device.events.clear()
    # Block 100 belongs to nobody that runs.
    outcome = runner.run(plan(2, [(0, 3, 1)], demote_device_ids=[100], demote_host_ids=[0]))
    assert outcome.copy_ns == 1000
    assert "copies 1" in device.events
    assert not any(event.startswith("follow") for event in device.events)
    runner.run(plan(3, [(1, 3, 1)], promote_host_ids=[0], promote_device_ids=[101]))
    runner.run(plan(4, [(0, 4, 1)], append_slots=[0], append_counts=[1], append_block_ids=[101]))
    # Copies run in order: who follows the last follows all.
    assert [event for event in device.events if event.startswith(("copies", "follow"))] == [
        "copies 1",
        "copies 2",
        "follow copies 2",
    ]


def test_no_step_waits_for_copies_of_others_blocks_to_end(tiny_directory: Path, device: EagerDevice) -> None:
    """Its tokens would come late, and the next step's launch: how long the copies take is then not known."""
    runner = ahead_runner(tiny_directory, device)
    device.copies_lag = True
    copies = {"demote_device_ids": [100], "demote_host_ids": [0]}
    outcome = runner.run(plan(1, [(0, 0, 3)], admissions=[admission()], **copies))
    assert outcome.copy_ns == 0
    assert len(outcome.sampled) == 1
    assert not any(event.startswith("follow") for event in device.events)


def test_ranges_name_the_phases_of_a_step(tiny_directory: Path, device: EagerDevice) -> None:
    runner = ahead_runner(tiny_directory, device, (2,))
    runner.run(plan(1, [(0, 0, 3)], admissions=[admission()]))
    runner.run(plan(2, [(0, 3, 1)]))
    named = [event for event in device.events if not event.startswith(("wait", "replay"))]
    assert named == [
        "step 1",
        "inputs",
        "3 tokens of 1 rows",
        "sampling of 1 rows",
        "step 2",
        "decode of 1 rows",
        "sampling of 1 rows",
    ]


def test_a_fault_of_the_kernels_is_a_plan_that_disagrees(tiny_directory: Path, device: EagerDevice) -> None:
    runner = ahead_runner(tiny_directory, device)
    forward = runner._model.forward
    runner._model.forward = lambda *given: replace(forward(*given), faults=torch.tensor([0, 5]))  # type: ignore[method-assign]
    flight = runner.launch(plan(1, [(0, 0, 3), (1, 0, 3)], admissions=[admission(), admission(slot=1)]))
    with pytest.raises(PlanError, match="row 1 of the step's batch disagrees with its blocks: fault 5"):
        flight.result()


def test_inputs_gathered_on_the_device_are_the_plain_ones(device: EagerDevice) -> None:
    rows = RowTable(RowLimits(6, 64, 4, 50, 100))
    inputs = DeviceInputs(rows, device)
    random = np.random.default_rng(0)
    for turn in range(12):
        slots = random.permutation(6)[: 1 + turn % 6].astype(np.int64)
        for slot in slots.tolist():
            if rows.states[slot] == 0 or rows.num_tokens[slot] > 50:
                if rows.states[slot]:
                    rows.release(slot)
                rows.admit(slot, random.integers(0, 100, 9).tolist(), 9, 0, random.integers(0, 50, 3).tolist())
            rows.append_blocks(slot, random.integers(0, 50, max(0, min(2, 15 - rows.num_blocks[slot]))).tolist())
        counts = random.integers(1, 4, len(slots)).clip(max=(rows.num_tokens - rows.num_computed_tokens)[slots])
        inputs.begin_step()
        found, expected = inputs.build(slots, counts), build_step_input(rows, slots, counts)
        assert torch.equal(found.token_ids, expected.token_ids)
        for name, value in vars(expected.batch).items():
            own = getattr(found.batch, name)
            if isinstance(value, torch.Tensor):
                assert own.dtype == value.dtype
                assert own.is_contiguous()
                lens = expected.batch.context_lens.tolist()
                if name == "block_tables":  # what lies behind a row's blocks means nothing
                    for row, length in enumerate(lens):
                        assert own[row, : -(-length // 4)].tolist() == value[row, : -(-length // 4)].tolist()
                else:
                    assert own.tolist() == value.tolist()
            else:
                assert own == value
        rows.commit(slots, counts)
        done = slots[rows.num_computed_tokens[slots] == rows.num_tokens[slots]]
        rows.append_tokens(done, random.integers(0, 100, len(done)))


def test_sizes_of_graphs() -> None:
    assert graph_sizes(1) == (1,)
    assert graph_sizes(3) == (1, 2, 3)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert graph_sizes(4096)[-1] == 512
    assert len(graph_sizes(4096)) <= 40
    for num_rows in range(64, 513):
        size = next(size for size in graph_sizes(4096) if size >= num_rows)
        assert size <= num_rows * 9 / 8


def test_a_batch_beyond_the_graphs_runs_without(tiny_directory: Path, device: EagerDevice) -> None:
    runner = ahead_runner(tiny_directory, device, (1,))
    runner.run(plan(1, [(0, 0, 3), (1, 0, 3)], admissions=[admission(), admission(slot=1)]))
    runner.run(plan(2, [(0, 3, 1), (1, 3, 1)]))
    assert "replay 1" not in device.events
    runner.run(plan(3, [(1, 4, 1)], append_slots=[1], append_counts=[1], append_block_ids=[40]))
    assert "replay 1" in device.events


def test_host_memory_is_not_reused_while_its_step_is_in_flight(device: EagerDevice) -> None:
    """As long as no more than two are, which the runner sees to."""
    uploads, downloads = Uploads(device), Downloads(device)
    before = list(uploads._buffers)
    first = downloads.fetch([torch.arange(3), torch.tensor([True, False]), torch.zeros(0, 2)])
    second = downloads.fetch([torch.arange(5, 9)])
    assert [x.tolist() for x in first.read()] == [[0, 1, 2], [True, False], []]
    assert second.read()[0].tolist() == [5, 6, 7, 8]
    uploads.begin_step()
    big = np.arange(5000, dtype=np.int64)
    (moved, small) = uploads.upload([big, np.array([True])])
    assert moved.tolist() == big.tolist()
    assert small.tolist() == [True]
    assert [new is old for new, old in zip(uploads._buffers, before, strict=True)] == [True, False]


def test_plans_without_rows_only_copy(tiny_directory: Path, device: EagerDevice) -> None:
    runner = ahead_runner(tiny_directory, device)
    outcome = runner.run(worker_pb2.StepPlan(step=1, demote_device_ids=[1], demote_host_ids=[2]))
    assert (outcome.sampled, outcome.copy_ns) == ((), 1000)
