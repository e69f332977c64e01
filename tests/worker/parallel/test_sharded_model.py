"""A model on two and four ranks against the same model on one, for every family.

In fp32 the greedy ids are the same and logprobs differ by the order of sums alone. On any number of ranks an answer
is bitwise the same alone, in company and in chunks of any size, and every rank's rows go on alike.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.select import open_backend
from tests.fakes.thread_group import ThreadGroup, on_ranks
from tests.fakes.tiny_families import FAMILIES, checkpoint_tensors, tiny_model, write_tiny_family
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, write_tiny_llama
from tests.worker.harness import Answer, Driver, RunnerShape, Tracked, answer, build_runner, sampling
from worker_svc.parallel.group import ALONE, TPGroup

TOLERANCE = 2e-4
SHAPE = RunnerShape(vocab_size=TINY_VOCAB_SIZE, max_model_len=128)
GREEDY = sampling(max_tokens=8, num_logprobs=2, num_prompt_logprobs=2)
SEEDED = sampling(max_tokens=8, temperature=0.9, seed=3, num_logprobs=2, num_prompt_logprobs=1, repetition_penalty=1.2)
PROMPTS = [[(7 * n * n + 3 * n + length) % TINY_VOCAB_SIZE for n in range(length)] for length in (1, 9, 33)]


def run_all(directory: Path, group: TPGroup, dtype: torch.dtype = torch.float32) -> list[Tracked]:
    """The prompts' greedy continuations on one rank."""
    driver = Driver(build_runner(directory, SHAPE, dtype, open_backend("auto", 1), group))
    sequences = [driver.add(prompt, GREEDY) for prompt in PROMPTS]
    driver.finish(*sequences)
    return sequences


@pytest.mark.parametrize("name", list(FAMILIES))
def test_ranks_answer_as_one(tmp_path: Path, name: str) -> None:
    write_tiny_family(tmp_path, FAMILIES[name], checkpoint_tensors(tiny_model(FAMILIES[name])))
    expected = [answer(sequence) for sequence in run_all(tmp_path, ALONE.group)]
    for num_ranks in (2, 4):
        found = on_ranks(num_ranks, lambda group: run_all(tmp_path, group))
        for sequence, wanted in zip(found[0], expected, strict=True):
            assert_close(answer(sequence), wanted)
        for other in found[1:]:
            assert [sequence.output for sequence in other] == [wanted.output for wanted in expected]


def assert_close(found: Answer, wanted: Answer) -> None:
    assert found.output == wanted.output
    assert len(found.logprobs) == len(wanted.logprobs)
    for (own, ids, top), (wanted_own, wanted_ids, wanted_top) in zip(found.logprobs, wanted.logprobs, strict=True):
        assert ids == wanted_ids
        assert own == pytest.approx(wanted_own, abs=TOLERANCE)
        assert top == pytest.approx(wanted_top, abs=TOLERANCE)
    assert found.prompt_logprobs.keys() == wanted.prompt_logprobs.keys()
    for position, (own_logprob, _, top_logprobs) in found.prompt_logprobs.items():
        assert own_logprob == pytest.approx(wanted.prompt_logprobs[position][0], abs=TOLERANCE)
        assert top_logprobs == pytest.approx(wanted.prompt_logprobs[position][2], abs=TOLERANCE)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_kv_heads_need_not_divide_and_biases_are_added_once(tmp_path: Path, num_ranks: int) -> None:
    shape = TinyLlama(hidden_size=72, num_heads=9, num_kv_heads=3, padding_rows=0, attention_bias=True, mlp_bias=True)
    directory = write_tiny_llama(tmp_path, shape)
    expected = [answer(sequence) for sequence in run_all(directory, ALONE.group)]
    found = on_ranks(num_ranks, lambda group: run_all(directory, group))[0]
    for sequence, wanted in zip(found, expected, strict=True):
        assert_close(answer(sequence), wanted)


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_f56_more_ranks_than_kv_heads_answer_as_one(tmp_path: Path, num_kv_heads: int) -> None:
    shape = TinyLlama(num_layers=1, num_heads=8, num_kv_heads=num_kv_heads, padding_rows=0)  # an odd vocabulary
    directory = write_tiny_llama(tmp_path, shape)
    expected = [answer(sequence) for sequence in run_all(directory, ALONE.group)]
    for num_ranks in (2, 4, 8):
        found = on_ranks(num_ranks, lambda group: run_all(directory, group))[0]
        for sequence, wanted in zip(found, expected, strict=True):
            assert_close(answer(sequence), wanted)


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.bfloat16), (4, torch.bfloat16), (4, torch.float32)])
def test_company_chunks_and_preemption_change_nothing(tmp_path: Path, num_ranks: int, dtype: torch.dtype) -> None:
    directory = write_tiny_llama(tmp_path, TinyLlama(num_heads=8, num_kv_heads=2, dtype=dtype))

    def answers(group: ThreadGroup) -> list[Answer]:
        driver = Driver(build_runner(directory, SHAPE, dtype, open_backend("auto", 1), group))
        found = []
        for chunk in (64, 1, 7):
            alone = driver.add(PROMPTS[-1], SEEDED)
            driver.finish(alone, chunk=chunk)
            found.append(answer(alone))
        company = [driver.add(prompt, sampling(temperature=1.0, seed=5)) for prompt in PROMPTS]
        sequence = driver.add(PROMPTS[-1], SEEDED)
        driver.step({each.key: min(7, len(each.tokens)) for each in (*company, sequence)})
        driver.preempt(sequence)
        driver.finish(*company, sequence, chunk=5)
        found.append(answer(sequence))
        return found

    first, *others = on_ranks(num_ranks, answers)
    assert len(first[0].output) == 8
    assert all(found == first[0] for found in first)
    for other in others:
        assert [found.output for found in other] == [found.output for found in first]


def test_swapped_blocks_are_each_ranks_own(tmp_path: Path) -> None:
    """Blocks go to the host tier and come back on every rank: what follows is as if they had stayed."""
    directory = write_tiny_llama(tmp_path, TinyLlama(num_heads=8, num_kv_heads=2))

    def output(group: TPGroup, swaps: bool) -> list[int]:
        shape = RunnerShape(vocab_size=TINY_VOCAB_SIZE, max_model_len=128, num_host_blocks=16)
        driver = Driver(build_runner(directory, shape, torch.float32, open_backend("auto", 1), group))
        sequence = driver.add(PROMPTS[-1], GREEDY)
        driver.step({sequence.key: len(sequence.tokens)})
        if swaps:
            driver.swap(sequence)
        driver.finish(sequence)
        return sequence.output

    expected = output(ALONE.group, swaps=False)
    assert on_ranks(2, lambda group: output(group, swaps=True)) == [expected, expected]
