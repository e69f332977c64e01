"""Every supported family against transformers, in fp32: tiny random checkpoints, at lengths around window edges.

Greedy ids must be the same. Logprobs agree within 2e-4: both compute in fp32 and differ in the order of their sums.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.reference import ReferenceBackend
from kernels.select import open_backend
from tests.fakes.tiny_families import (
    FAMILIES,
    ORIGINAL_POSITIONS,
    PADDING_ROWS,
    WINDOW,
    TinyFamily,
    checkpoint_tensors,
    config_json,
    pin_rope_length,
    tiny_model,
    write_tiny_family,
)
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE
from tests.worker.harness import Driver, RunnerShape, Tracked, build_runner, sampling
from worker_svc.model.build import _kept, build_decoder
from worker_svc.model.families import parse_config
from worker_svc.model.sharding import shard_model
from worker_svc.parallel.group import OneRank
from worker_svc.runner import Runner
from worker_svc.weights import WeightsError

LOGPROB_TOLERANCE = 2e-4
NUM_OUTPUT_TOKENS = 24
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1, 40)
PROMPTS = [random.Random(length).choices(range(1, TINY_VOCAB_SIZE), k=length) for length in LENGTHS]
PARAMS = sampling(max_tokens=NUM_OUTPUT_TOKENS, num_logprobs=2, num_prompt_logprobs=2)
SHAPE = RunnerShape(vocab_size=TINY_VOCAB_SIZE, max_model_len=128)


class Case:
    """A checkpoint under test with transformers' own model of it."""

    def __init__(self, directory: Path, family: TinyFamily) -> None:
        self.directory = directory
        self.oracle: Any = tiny_model(family)
        write_tiny_family(directory, family, checkpoint_tensors(self.oracle))
        if family.config.rope_parameters.get("rope_type") in ("dynamic", "longrope"):
            pin_rope_length(self.oracle, SHAPE.max_model_len)

    @cached_property
    def runner(self) -> Runner:
        """With the kernels of this machine."""
        backend = open_backend("auto", 1)
        runner = build_runner(self.directory, SHAPE, backend=backend)
        assert backend.info.batch_invariant, backend.info.invariance_note
        return runner

    @cached_property
    def answers(self) -> list[Tracked]:
        """The continuation of each of PROMPTS, all run together, each prompt in one chunk."""
        return run(self.runner, chunk=64)

    @torch.inference_mode()
    def oracle_logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """[len, vocabulary] log-softmax over the real vocabulary after each token."""
        logits = self.oracle(torch.tensor([token_ids]), use_cache=False).logits[0, :, :TINY_VOCAB_SIZE]
        return torch.log_softmax(logits.double(), dim=-1)


@pytest.fixture(scope="module", params=list(FAMILIES))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp(request.param), FAMILIES[request.param])


def run(runner: Runner, chunk: int) -> list[Tracked]:
    runner.reset()
    driver = Driver(runner)
    sequences = [driver.add(prompt, PARAMS) for prompt in PROMPTS]
    driver.finish(*sequences, chunk=chunk)
    return sequences


def seen(sequence: Tracked) -> tuple[object, ...]:
    """Everything a client could see, for comparison by equality."""
    logprobs = [(found.tokens.tolist(), found.top_ids.tolist(), found.top.tolist()) for found in sequence.logprobs]
    return sequence.output, logprobs, sorted(sequence.prompt_logprobs.items())


def assert_is_transformers(case: Case, sequence: Tracked) -> None:
    prompt_len = sequence.num_prompt
    oracle = case.oracle_logprobs(sequence.tokens)
    assert len(sequence.output) == NUM_OUTPUT_TOKENS
    # Each token is the likeliest after those before it: by induction, the greedy continuation.
    assert sequence.output == oracle[prompt_len - 1 : -1].argmax(dim=-1).tolist()
    assert sorted(sequence.prompt_logprobs) == list(range(1, prompt_len))
    for position, (logprob, top_ids, top) in sequence.prompt_logprobs.items():
        expected = oracle[position - 1]
        assert logprob == pytest.approx(expected[sequence.tokens[position]].item(), abs=LOGPROB_TOLERANCE)
        assert list(top) == pytest.approx(expected[list(top_ids)].tolist(), abs=LOGPROB_TOLERANCE)
    for offset, found in enumerate(sequence.logprobs):
        expected = oracle[prompt_len + offset - 1]
        assert found.top_ids[0].tolist() == expected.topk(2).indices.tolist()
        assert found.top[0].tolist() == pytest.approx(expected.topk(2).values.tolist(), abs=LOGPROB_TOLERANCE)


def test_ids_and_logprobs_are_those_of_transformers(case: Case) -> None:
    for sequence in case.answers:
        assert_is_transformers(case, sequence)


def test_chunks_change_nothing(case: Case) -> None:
    expected = [seen(sequence) for sequence in case.answers]
    assert [seen(sequence) for sequence in run(case.runner, chunk=5)] == expected


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "qwen2"])
def test_the_reference_kernels_agree(tmp_path: Path, name: str) -> None:
    case = Case(tmp_path, FAMILIES[name])
    runner = build_runner(case.directory, SHAPE, backend=ReferenceBackend(1))
    whole = run(runner, chunk=64)
    for sequence in whole:
        assert_is_transformers(case, sequence)
    assert [seen(sequence) for sequence in run(runner, chunk=5)] == [seen(sequence) for sequence in whole]


def test_16_bits_keep_what_they_can(tmp_path: Path) -> None:
    """Gemma 3 has it all: a rounded scale, norms of one plus a small weight, on heads too. No truth but fp32's."""
    case = Case(tmp_path, FAMILIES["gemma3"])
    backend = open_backend("auto", 1)
    runner = build_runner(case.directory, SHAPE, torch.bfloat16, backend)
    whole = run(runner, chunk=64)
    assert [seen(sequence) for sequence in run(runner, chunk=5)] == [seen(sequence) for sequence in whole]
    assert backend.info.batch_invariant, backend.info.invariance_note
    for sequence in whole:
        oracle = case.oracle_logprobs(sequence.tokens)
        errors = [
            abs(logprob - oracle[position - 1, sequence.tokens[position]].item())
            for position, (logprob, _, _) in sequence.prompt_logprobs.items()
        ]
        assert sum(errors) <= 0.03 * len(errors), max(errors)


@dataclass(frozen=True)
class Tensors:
    """A model's tensors, in memory."""

    tensors: dict[str, torch.Tensor]

    def take(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    take_matrix = take


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_embeddings_are_scaled_as_transformers_rounds_it(name: str) -> None:
    fp32: Any = tiny_model(FAMILIES[name])
    oracle = fp32.to(torch.bfloat16)
    # Rounded to bf16 it is another number than sqrt(72).
    config = replace(parse_config(config_json(FAMILIES[name])), embedding_scale=72**0.5)
    embedding = oracle.model.embed_tokens
    embedding.embed_scale = torch.tensor(72**0.5)
    shard = shard_model(config, 0, 1)
    decoder = build_decoder(shard, OneRank(), Tensors(checkpoint_tensors(oracle)), ReferenceBackend(1), 16)
    ids = torch.arange(TINY_VOCAB_SIZE)
    assert torch.equal(decoder.embed(ids), embedding(ids))


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"])
def test_a_window_of_one_more_position_is_another_model(tmp_path: Path, name: str) -> None:
    """The comparison above would see a window that is off by one."""
    family = FAMILIES[name]
    tensors = checkpoint_tensors(tiny_model(family))
    answers = []
    for window in (WINDOW, WINDOW + 1):
        rewritten = replace(family, rewritten={**family.rewritten, "sliding_window": window})
        directory = write_tiny_family(tmp_path / str(window), rewritten, tensors)
        driver = Driver(build_runner(directory, SHAPE, backend=open_backend("auto", 1)))
        sequence = driver.add(PROMPTS[LENGTHS.index(WINDOW + 1)], sampling(num_logprobs=0, num_prompt_logprobs=0))
        driver.finish(sequence)
        answers.append([logprob for _, (logprob, _, _) in sorted(sequence.prompt_logprobs.items())])
        answers[-1].append(float(sequence.logprobs[0].tokens[0]))
    within, edge = WINDOW - 1, WINDOW
    assert answers[0][:within] == pytest.approx(answers[1][:within], abs=1e-6)
    # What follows the first token that sees one position less.
    assert abs(answers[0][edge] - answers[1][edge]) > 10 * LOGPROB_TOLERANCE


@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_longrope"])
def test_a_length_within_the_original_one_needs_no_scaling(tmp_path: Path, name: str) -> None:
    """Configured for no more than that, the model is transformers' own without any pinning."""
    family = FAMILIES[name]
    case = Case(tmp_path, family)
    case.oracle = tiny_model(family)
    shape = replace(SHAPE, max_model_len=ORIGINAL_POSITIONS)
    driver = Driver(build_runner(case.directory, shape, backend=open_backend("auto", 1)))
    sequence = driver.add(PROMPTS[LENGTHS.index(WINDOW)], PARAMS)
    driver.finish(sequence)
    assert len(sequence.tokens) == ORIGINAL_POSITIONS
    assert_is_transformers(case, sequence)


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight"),
        ("gemma2", "model.layers.2.post_feedforward_layernorm.weight"),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight"),
        ("mistral", "lm_head.weight"),
    ],
)
def test_a_missing_tensor_is_refused_by_name(tmp_path: Path, name: str, lost: str) -> None:
    tensors = checkpoint_tensors(tiny_model(FAMILIES[name]))
    shape = list(tensors.pop(lost).shape)
    directory = write_tiny_family(tmp_path, FAMILIES[name], tensors)
    with pytest.raises(WeightsError) as caught:
        build_runner(directory, SHAPE)
    assert f"1 tensor missing from the checkpoint:\n  {lost} {shape}" in str(caught.value)


def test_an_unexpected_bias_is_refused_by_name(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(tiny_model(FAMILIES["mistral"]))
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(128)
    directory = write_tiny_family(tmp_path, FAMILIES["mistral"], tensors)
    with pytest.raises(WeightsError, match=r"unexpected in the checkpoint:\n  model.layers.0.self_attn.q_proj.bias"):
        build_runner(directory, SHAPE)


def test_only_what_may_be_a_mapped_files_is_copied() -> None:
    """A tied head on a card is the embedding itself."""
    mapped, on_card = torch.ones(3, 2), torch.empty(3, 2, device="meta")
    assert _kept(mapped).data_ptr() != mapped.data_ptr()
    assert _kept(on_card) is on_card


def test_padding_rows_are_in_every_checkpoint() -> None:
    assert {config_json(family)["vocab_size"] for family in FAMILIES.values()} == {TINY_VOCAB_SIZE + PADDING_ROWS}
