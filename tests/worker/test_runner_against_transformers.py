"""Tiny random Llama checkpoints: the runner against transformers, in fp32.

Greedy ids must be the same. Logprobs agree within 2e-4: both compute in fp32 and differ in the order of their sums.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, write_tiny_llama
from tests.worker.harness import Driver, RunnerShape, build_runner, greedy_alone, sampling
from worker_svc.runner import Runner

LOGPROB_TOLERANCE = 2e-4
NUM_OUTPUT_TOKENS = 24

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

SHAPES = {
    "gqa": TinyLlama(),
    "tied": TinyLlama(tied_embeddings=True, seed=1),
    "mha_biased": TinyLlama(num_kv_heads=4, attention_bias=True, mlp_bias=True, seed=2),
    "mqa_wide_head": TinyLlama(num_kv_heads=1, head_dim=32, seed=3),
    "rope_llama3": TinyLlama(rope_scaling=LLAMA3, rope_theta=500_000.0, seed=4),
    "rope_linear": TinyLlama(rope_scaling={"type": "linear", "factor": 4.0}, seed=5),
}


class Case:
    """A checkpoint under test with transformers' own model of it."""

    def __init__(self, directory: Path, shape: TinyLlama) -> None:
        write_tiny_llama(directory, shape)
        self.runner: Runner = build_runner(directory, RunnerShape(vocab_size=TINY_VOCAB_SIZE))
        self.oracle = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")

    @cached_property
    def greedy_outputs(self) -> list[list[int]]:
        """The continuation of each of PROMPTS, run alone."""
        return [greedy_alone(self.runner, token_ids, NUM_OUTPUT_TOKENS) for token_ids in PROMPTS]

    @torch.inference_mode()
    def oracle_logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """[len, vocabulary] log-softmax over the real vocabulary after each token."""
        logits = self.oracle(torch.tensor([token_ids])).logits[0, :, :TINY_VOCAB_SIZE]
        return torch.log_softmax(logits.double(), dim=-1)


@pytest.fixture(scope="module", params=list(SHAPES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), SHAPES[request.param])


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, TINY_VOCAB_SIZE, (length,), generator=generator).tolist()


PROMPTS = [prompt(length, seed) for seed, length in enumerate((1, 2, 9, 40, 150))]


def test_greedy_ids_are_those_of_transformers(case: Case) -> None:
    for token_ids, output in zip(PROMPTS, case.greedy_outputs, strict=True):
        assert len(output) == NUM_OUTPUT_TOKENS
        # Each token is the likeliest after those before it: by induction, the greedy continuation.
        oracle = case.oracle_logprobs(token_ids + output)
        assert output == oracle[len(token_ids) - 1 : -1].argmax(dim=-1).tolist()


def test_logprobs_are_those_of_transformers(case: Case) -> None:
    token_ids = PROMPTS[3]
    case.runner.reset()
    driver = Driver(case.runner)
    sequence = driver.add(token_ids, sampling(max_tokens=8, num_logprobs=3, num_prompt_logprobs=2))
    driver.finish(sequence, chunk=7)
    oracle = case.oracle_logprobs(sequence.tokens)
    assert sorted(sequence.prompt_logprobs) == list(range(1, len(token_ids)))
    for position, (logprob, top_ids, top) in sequence.prompt_logprobs.items():
        expected = oracle[position - 1]
        assert logprob == pytest.approx(expected[token_ids[position]].item(), abs=LOGPROB_TOLERANCE)
        assert list(top_ids) == expected.topk(2).indices.tolist()
        assert list(top) == pytest.approx(expected.topk(2).values.tolist(), abs=LOGPROB_TOLERANCE)
    for offset, found in enumerate(sequence.logprobs):
        expected = oracle[len(token_ids) + offset - 1]
        assert found.tokens[0] == pytest.approx(expected.max().item(), abs=LOGPROB_TOLERANCE)
        assert found.top_ids[0].tolist() == expected.topk(3).indices.tolist()
        assert found.top[0].tolist() == pytest.approx(expected.topk(3).values.tolist(), abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_nothing(case: Case, chunk: int) -> None:
    expected = [output[:6] for output in case.greedy_outputs]
    case.runner.reset()
    driver = Driver(case.runner)
    sequences = [driver.add(token_ids, sampling(max_tokens=6)) for token_ids in PROMPTS]
    driver.finish(*sequences, chunk=chunk)
    assert [sequence.output for sequence in sequences] == expected
