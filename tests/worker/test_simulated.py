"""The simulated worker: the same checks as the real one, made-up tokens that depend on seed and position alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from octavo.cost_model import CostModel
from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.phases import Phases
from octavo.process import StartError
from worker_svc.config import WorkerConfig
from worker_svc.messages import step_result, token_batches
from worker_svc.rows import PlanError, RowLimits
from worker_svc.simulated import SimulatedModel, SimulatedRunner, load_simulation

END, STOP = 9, 12
LIMITS = RowLimits(num_slots=4, max_model_len=64, block_size=4, num_blocks=32, vocab_size=100)
COSTS = CostModel(1000, step_ms=10, row_us=1000, kv_token_ns=1000, copy_us=500, output_tokens=8)


class Waits(list[float]):
    """Takes what is waited for in place of waiting."""

    def __call__(self, seconds: float) -> None:
        self.append(seconds)


def runner(waits: Waits | None = None) -> SimulatedRunner:
    model = SimulatedModel(COSTS, (10, 11, 12, 13), max_step_tokens=16, num_host_blocks=2)
    return SimulatedRunner(model, LIMITS, waits if waits is not None else Waits())


def sampling(max_tokens: int = 40, **fields: object) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(max_tokens=max_tokens, **fields)  # type: ignore[arg-type]


def admission(slot: int, prompt: Sequence[int], params: types_pb2.SamplingParams) -> worker_pb2.Admission:
    return worker_pb2.Admission(
        slot=slot,
        token_ids=prompt,
        num_prompt_tokens=len(prompt),
        block_ids=range(slot * 16, slot * 16 + 16),
        sampling=params,
        router_id=5,
        stream_key=70 + slot,
        attempt=1,
    )


def answer(
    params: types_pb2.SamplingParams, prompt: Sequence[int] = (1, 2, 3), chunk: int = 16
) -> tuple[list[int], int]:
    """All tokens of one sequence that runs alone, and why it ended."""
    replica, step, computed, known, tokens, reason = runner(), 0, 0, len(prompt), list[int](), 0
    while not reason:
        step += 1
        count = min(chunk, known - computed)
        plan = worker_pb2.StepPlan(step=step, row_slots=[0], row_starts=[computed], row_counts=[count])
        if step == 1:
            plan.admissions.append(admission(0, prompt, params))
        result = step_result(replica.run(plan), 1, (), 0)
        computed += count
        known += len(result.token_ids)
        tokens += result.token_ids
        reason = result.finish_reasons[0]
    return tokens, reason


def test_a_greedy_answer_repeats_the_phrase_until_its_length() -> None:
    tokens, reason = answer(sampling(max_tokens=6))
    assert (tokens, reason) == ([10, 11, 12, 13, 10, 11], types_pb2.FINISH_REASON_LENGTH)
    assert answer(sampling(max_tokens=6), prompt=range(20), chunk=3)[0] == tokens


def test_an_answer_ends_by_itself_unless_ends_are_ignored() -> None:
    lengths = {len(answer(sampling(end_token_ids=[END], seed=seed))[0]) for seed in range(30)}
    assert min(lengths) >= 4
    assert max(lengths) <= 12
    assert len(lengths) > 3
    assert answer(sampling(end_token_ids=[END]))[1] == types_pb2.FINISH_REASON_END_TOKEN
    assert len(answer(sampling(max_tokens=30, end_token_ids=[END], min_tokens=20))[0]) == 20
    assert answer(sampling(max_tokens=30))[1] == types_pb2.FINISH_REASON_LENGTH


def test_a_stop_token_ends_an_answer_and_is_not_listed() -> None:
    assert answer(sampling(stop_token_ids=[STOP])) == ([10, 11], types_pb2.FINISH_REASON_STOP_TOKEN)
    assert answer(sampling(stop_token_ids=[STOP], min_tokens=3))[0] == [10, 11, 12, 13, 10, 11]


def test_the_context_limit_ends_an_answer() -> None:
    tokens, reason = answer(sampling(max_tokens=1000), prompt=range(16), chunk=16)
    assert (len(tokens) + 16, reason) == (64, types_pb2.FINISH_REASON_LENGTH)


def test_a_step_takes_as_long_as_its_costs_say() -> None:
    waits = Waits()
    replica = runner(waits)
    first = worker_pb2.StepPlan(step=1, row_slots=[0, 1], row_starts=[0, 0], row_counts=[10, 1])
    first.admissions.extend([admission(0, range(10), sampling()), admission(1, [1], sampling())])
    replica.run(first)
    second = worker_pb2.StepPlan(step=2, row_slots=[0, 1], row_starts=[10, 1], row_counts=[1, 1])
    second.demote_device_ids[:], second.demote_host_ids[:] = [20], [0]
    replica.run(second)
    assert waits[0] == pytest.approx(0.010 + 10 / 1000 + 0.001, abs=0.005)
    assert waits[1] == pytest.approx(0.010 + 2 * 0.001 + 11e-6 + 0.0005, abs=0.005)


def test_logprobs_are_made_up_for_those_who_ask() -> None:
    replica = runner()
    plan = worker_pb2.StepPlan(step=1, row_slots=[0], row_starts=[0], row_counts=[3])
    plan.admissions.append(admission(0, [1, 2, 3], sampling(num_logprobs=2, num_prompt_logprobs=1)))
    (sampled,) = (batch.message for batch in token_batches(replica.run(plan))[5])
    (entry,) = sampled.prompt_logprobs
    assert (entry.start, len(entry.tokens), list(entry.top_token_ids)) == (1, 2, [2, 3])
    assert list(sampled.token_ids) == [10]
    assert list(sampled.logprobs[0].top_token_ids) == [10, 11]
    assert sampled.logprobs[0].top[0] > sampled.logprobs[0].top[1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"step": 2}, "the worker expects 1"),
        ({"row_slots": [3]}, "EMPTY|slot 3"),
        ({"row_slots": [4]}, "4 slots"),
        ({"row_counts": [17]}, "a step takes 16"),
        ({"row_starts": [1]}, "starts at 1"),
        ({"row_starts": []}, "0 starts"),
        ({"append_block_ids": [1]}, "1 blocks appended"),
        ({"promote_host_ids": [2], "promote_device_ids": [1]}, "copies blocks"),
        ({"demote_host_ids": [1]}, "copies blocks"),
    ],
)
def test_a_plan_that_disagrees_is_refused(fields: dict[str, object], words: str) -> None:
    values = {"step": 1, "row_slots": [0], "row_starts": [0], "row_counts": [3], **fields}
    plan = worker_pb2.StepPlan(**values)  # type: ignore[arg-type]
    plan.admissions.append(admission(0, [1, 2, 3], sampling()))
    with pytest.raises(PlanError, match=words):
        runner().run(plan)


def test_it_is_known_by_the_models_tokenizer_and_the_options(tmp_path: Path) -> None:
    config = WorkerConfig(simulate=True, swap_space=1.0, kv_cache_memory=2**30, max_model_len=100, max_num_seqs=3)
    hello = load_simulation(config, Phases()).hello
    assert (hello.num_device_blocks, hello.num_host_blocks, hello.num_slots) == (512, 512, 3)
    assert (hello.model.name, hello.model.max_model_len) == (config.model, 100)
    assert hello.model.vocab_size > 1000
    assert hello.model.end_token_ids
    tight = WorkerConfig(simulate=True, kv_cache_memory=2**20, simulated_costs="kv_bytes=1e9")
    with pytest.raises(StartError, match="holds no block of 16 tokens"):
        load_simulation(tight, Phases())


def test_no_torch_is_loaded() -> None:
    program = (
        "import sys, worker_svc.server, worker_svc.engine, worker_svc.token_outlet, worker_svc.simulated; "
        "sys.exit(f'loaded {loaded}' if (loaded := {'torch', 'transformers'} & set(sys.modules)) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
