"""SmolLM2-135M-Instruct in fp32: the runner's greedy ids against transformers' own reading of the same GGUF file.

transformers checks instead of generating: the output is its greedy continuation exactly when, after every prefix of it,
the next id is the likeliest. One forward pass per prompt shows that, where generating would take 64.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GgufConfig

from kernels.select import open_backend
from octavo.sources import DEFAULT_MODEL, ModelSource, resolve
from tests.worker.harness import Driver, RunnerShape, build_runner, sampling
from worker_svc.runner import Runner
from worker_svc.warm_up import PROBE_TEXT, warm_up

NUM_OUTPUT_TOKENS = 64

QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three prime numbers above one hundred.",
    "Why is the sky blue?",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes.",
    "Who wrote Romeo and Juliet?",
)
TEXTS = (
    "Once upon a time, in a village by the river,",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n",
    "In 1969, the first humans",
    "The quick brown fox",
    "import numpy as np\n\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8,",
    "Das Wetter ist heute",
    "La tour Eiffel est",
    "Q: What is 12 times 12?\nA:",
    '{"name": "Ada", "age":',
)


@dataclass(frozen=True)
class Answers:
    """Every prompt with the runner's greedy continuation."""

    source: ModelSource
    tokenizer: Tokenizer
    runner: Runner
    prompts: tuple[list[int], ...]
    outputs: tuple[list[int], ...]


@pytest.fixture(scope="module")
def answers() -> Answers:
    source = resolve(DEFAULT_MODEL)
    tokenizer = Tokenizer.from_file(str(source.directory / "tokenizer.json"))
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    prompts = tuple(tokenizer.encode(text).ids for text in (*chats, *TEXTS))
    shape = RunnerShape(num_slots=len(prompts), num_blocks=256, block_size=16, max_model_len=256)
    runner = build_runner(source, shape, backend=open_backend("auto", None))
    driver = Driver(runner)
    sequences = [driver.add(token_ids, sampling(max_tokens=NUM_OUTPUT_TOKENS)) for token_ids in prompts]
    driver.finish(*sequences, chunk=24)
    runner.reset()
    return Answers(source, tokenizer, runner, prompts, tuple(sequence.output for sequence in sequences))


@torch.inference_mode()
def test_greedy_ids_are_those_of_transformers(answers: Answers) -> None:
    oracle = AutoModelForCausalLM.from_pretrained(
        answers.source.weights.parent,
        gguf_file=answers.source.weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    assert len(answers.prompts) >= 20
    for prompt, output in zip(answers.prompts, answers.outputs, strict=True):
        assert len(output) == NUM_OUTPUT_TOKENS
        logits = oracle(torch.tensor([prompt + output]), logits_to_keep=NUM_OUTPUT_TOKENS + 1).logits[0, :-1]
        assert output == logits.argmax(dim=-1).tolist()


def test_the_probe_knows_its_own_tokenizer(answers: Answers) -> None:
    token_ids = answers.tokenizer.encode(PROBE_TEXT).ids
    own = warm_up(answers.runner, token_ids)
    assert own.loss < 0.4 * own.chance_loss
    assert not own.is_suspicious
    vocab_size = answers.runner.limits.rows.vocab_size
    permutation = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0)).tolist()
    for foreign in ([permutation[token_id] for token_id in token_ids], [(7 + token_id) for token_id in token_ids]):
        assert warm_up(answers.runner, foreign).is_suspicious
