"""Sampling and endings on the runner, end to end: what a sequence's parameters do to its tokens."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from octavo.internal.v1 import types_pb2
from tests.fakes.checkpoint_files import ModelFiles, write_model
from tests.fakes.scripted_model import ScriptedModel
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, random_tensors, tiny_config
from tests.fakes.tiny_tokenizers import tiny_tokenizer
from tests.worker.harness import Driver, RunnerShape, Tracked, build_runner, sampling

END = types_pb2.FINISH_REASON_END_TOKEN
STOP = types_pb2.FINISH_REASON_STOP_TOKEN
LENGTH = types_pb2.FINISH_REASON_LENGTH
NUMERIC_ERROR = types_pb2.FINISH_REASON_NUMERIC_ERROR


def run(driver: Driver, tokens: list[int], **params: object) -> Tracked:
    sequence = driver.add(tokens, sampling(**params))
    driver.finish(sequence)
    return sequence


def test_an_end_token_ends_unlisted(parrot: ScriptedModel, parrot_driver: Driver) -> None:
    sequence = run(parrot_driver, [parrot.trigger_id], end_token_ids=[parrot.end_id])
    assert (sequence.output, sequence.finish) == (list(parrot.script_ids[:-1]), END)


def test_f18_without_end_set_only_length_ends(parrot: ScriptedModel, parrot_driver: Driver) -> None:
    sequence = run(parrot_driver, [parrot.trigger_id], max_tokens=9)
    assert sequence.output[:7] == list(parrot.script_ids)
    assert (len(sequence.output), sequence.finish) == (9, LENGTH)


def test_f18_nothing_to_mask_leaves_the_last_token_as_it_is(driver: Driver) -> None:
    last = TINY_VOCAB_SIZE - 1
    params = {"bias_token_ids": [last], "bias_values": [100.0], "min_tokens": 3, "max_tokens": 3}
    assert run(driver, [7], **params).output == [last] * 3


def test_a_stop_id_ends_unlisted(parrot: ScriptedModel, parrot_driver: Driver) -> None:
    third = parrot.script_ids[2]
    sequence = run(parrot_driver, [parrot.trigger_id], stop_token_ids=[third], end_token_ids=[parrot.end_id])
    assert (sequence.output, sequence.finish) == (list(parrot.script_ids[:2]), STOP)


def test_the_end_set_comes_before_stop_ids_and_length(parrot: ScriptedModel, parrot_driver: Driver) -> None:
    third = parrot.script_ids[2]
    ends = {"end_token_ids": [third], "stop_token_ids": [third], "max_tokens": 3}
    assert run(parrot_driver, [parrot.trigger_id], **ends).finish == END


def test_max_tokens_counts_prior_output(parrot: ScriptedModel, parrot_driver: Driver) -> None:
    resumed = Tracked(1, [parrot.trigger_id, *parrot.script_ids[:2]], 1, sampling(max_tokens=4))
    parrot_driver.by_key[1] = resumed
    parrot_driver.finish(resumed)
    assert (resumed.output, resumed.finish) == (list(parrot.script_ids[:4]), LENGTH)


def test_the_context_length_ends_with_length(driver: Driver) -> None:
    limit = driver.limits.rows.max_model_len
    sequence = run(driver, [5] * (limit - 3), max_tokens=1000)
    assert (len(sequence.tokens), sequence.finish) == (limit, LENGTH)


def test_f18_min_tokens_masks_end_and_stop_ids(parrot: ScriptedModel, parrot_driver: Driver) -> None:
    first, second = parrot.script_ids[:2]
    params = {"end_token_ids": [parrot.end_id, first], "stop_token_ids": [second], "min_tokens": 3, "max_tokens": 5}
    sequence = run(parrot_driver, [parrot.trigger_id], **params)
    assert not {parrot.end_id, first, second} & set(sequence.output)
    assert len(sequence.output) >= 3


def test_f18_min_tokens_counts_output_and_not_prompt(parrot: ScriptedModel, parrot_driver: Driver) -> None:
    prompt = [*b"a long prompt", parrot.trigger_id]
    sequence = run(parrot_driver, prompt, stop_token_ids=[parrot.script_ids[1]], min_tokens=1)
    assert (sequence.output, sequence.finish) == (list(parrot.script_ids[:1]), STOP)


def test_logit_bias_decides(driver: Driver) -> None:
    sequence = run(driver, [7], bias_token_ids=[42], bias_values=[100.0], max_tokens=3)
    assert sequence.output == [42, 42, 42]


def test_penalties_see_the_history(parrot_driver: Driver) -> None:
    # Beside the script the parrot's logits are all zero: the bias alone decides, until penalties take from it.
    params = {"bias_token_ids": [41, 42], "bias_values": [20.0, 21.0], "max_tokens": 4}
    assert run(parrot_driver, [7], **params).output == [42, 42, 42, 42]
    assert run(parrot_driver, [7], presence_penalty=2.0, **params).output == [42, 41, 42, 42]
    assert run(parrot_driver, [7], frequency_penalty=2.0, **params).output == [42, 41, 42, 41]
    # Repetition counts the prompt, the other two do not.
    assert run(parrot_driver, [42], repetition_penalty=2.0, **params).output[0] == 41
    assert run(parrot_driver, [42], presence_penalty=2.0, frequency_penalty=2.0, **params).output[0] == 42


@pytest.mark.parametrize("limit", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}])
def test_f14_narrowest_settings_are_greedy(driver: Driver, limit: dict[str, float]) -> None:
    greedy = run(driver, [9, 8, 7], max_tokens=8).output
    assert run(driver, [9, 8, 7], max_tokens=8, **{"temperature": 1.0, "seed": 3, **limit}).output == greedy


def test_f10_a_seed_repeats_alone_and_in_company(driver: Driver) -> None:
    params = sampling(temperature=1.0, seed=2**63 + 5, max_tokens=12)
    alone = driver.add([9, 8, 7], params)
    driver.finish(alone)
    others = [driver.add([3] * n, sampling(temperature=1.5, seed=n, max_tokens=12)) for n in (1, 5, 30)]
    again = driver.add([9, 8, 7], params)
    driver.finish(*others, again, chunk=2)
    assert again.output == alone.output
    other_seed = driver.add([9, 8, 7], sampling(temperature=1.0, seed=6, max_tokens=12))
    driver.finish(other_seed)
    assert other_seed.output != alone.output


def test_padding_is_never_sampled(tmp_path: Path) -> None:
    """Rows of the head beyond the tokenizer's ids would win every choice here."""
    shape = TinyLlama(num_layers=1)
    tensors = random_tensors(shape)
    tensors["lm_head.weight"][TINY_VOCAB_SIZE:] *= 100
    write_model(tmp_path, ModelFiles(tiny_config(shape), tensors, tiny_tokenizer([])))
    driver = Driver(build_runner(tmp_path, RunnerShape(vocab_size=TINY_VOCAB_SIZE)))
    for temperature in (0.0, 1.0):
        sequence = run(driver, [9], temperature=temperature, seed=1, num_logprobs=3, max_tokens=4)
        assert max(sequence.output) < TINY_VOCAB_SIZE
        assert max(int(found.top_ids.max()) for found in sequence.logprobs) < TINY_VOCAB_SIZE


def test_logprobs_are_of_the_raw_logits(driver: Driver) -> None:
    plain = run(driver, [9, 8], num_logprobs=5, max_tokens=1)
    biased = run(driver, [9, 8], num_logprobs=2, max_tokens=1, bias_token_ids=[42], bias_values=[100.0], temperature=2)
    assert plain.logprobs[0].top_ids[0, 0] == plain.output[0]
    assert plain.logprobs[0].top[0, 0] == plain.logprobs[0].tokens[0]
    assert biased.output == [42]
    assert biased.logprobs[0].top_ids.tolist() == plain.logprobs[0].top_ids[:, :2].tolist()
    assert biased.logprobs[0].tokens[0] < biased.logprobs[0].top[0, 1]


def test_each_row_gets_the_alternatives_it_asked_for(driver: Driver) -> None:
    asked = [driver.add([n + 1], sampling(num_logprobs=n, max_tokens=2)) for n in (0, 3, 1)]
    silent = driver.add([30], sampling(max_tokens=2))
    driver.finish(*asked, silent)
    assert [[found.top.shape for found in sequence.logprobs] for sequence in asked] == [
        [(1, 0)] * 2,
        [(1, 3)] * 2,
        [(1, 1)] * 2,
    ]
    assert silent.logprobs == []


def test_an_end_token_has_no_logprobs(parrot: ScriptedModel, parrot_driver: Driver) -> None:
    sequence = run(parrot_driver, [parrot.trigger_id], end_token_ids=[parrot.script_ids[2]], num_logprobs=0)
    assert len(sequence.logprobs) == len(sequence.output) == 2


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_prompt_logprobs_come_from_their_start(driver: Driver, chunk: int) -> None:
    prompt = list(range(20, 60))
    params = {"num_prompt_logprobs": 1, "max_tokens": 2}
    whole = driver.add(prompt, sampling(**params))
    driver.finish(whole)
    part = driver.add(prompt, sampling(prompt_logprobs_start=11, **params))
    silent = driver.add(prompt, sampling(max_tokens=2))
    driver.finish(silent, part, chunk=chunk)
    assert sorted(whole.prompt_logprobs) == list(range(1, 40))
    assert part.prompt_logprobs == {position: whole.prompt_logprobs[position] for position in range(11, 40)}
    assert silent.prompt_logprobs == {}


def test_the_prompt_logprobs_are_the_output_logprobs(driver: Driver) -> None:
    """What a token cost when it was sampled is what it costs in a prompt."""
    sampled = run(driver, [9, 8], num_logprobs=0, max_tokens=6)
    prompt = run(driver, sampled.tokens, num_prompt_logprobs=0, prompt_logprobs_start=2, max_tokens=1)
    costs = [prompt.prompt_logprobs[position][0] for position in range(2, 8)]
    assert costs == [found.tokens[0] for found in sampled.logprobs]


def _poison(driver: Driver, token_id: int) -> torch.Tensor:
    embedding = driver.runner._head._decoder._weights.embedding.table
    row = embedding[token_id].clone()
    embedding[token_id] = math.nan
    return row


def test_a_numeric_error_ends_one_row(driver: Driver) -> None:
    alone = run(driver, [9, 8], max_tokens=4).output
    row = _poison(driver, 77)
    try:
        good, bad = driver.add([9, 8], sampling(max_tokens=4)), driver.add([77, 8], sampling(max_tokens=4))
        asking = driver.add([77] * 20, sampling(num_prompt_logprobs=0))
        driver.finish(good, bad, asking, chunk=8)
    finally:
        driver.runner._head._decoder._weights.embedding.table[77] = row
    assert (good.output, good.finish) == (alone, LENGTH)
    assert (bad.output, bad.finish) == ([], NUMERIC_ERROR)
    # Not a number crosses to a client: the row ends with the chunk that showed it.
    assert (asking.num_computed, asking.finish, asking.prompt_logprobs) == (8, NUMERIC_ERROR, {})
