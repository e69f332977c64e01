"""The first step: one token is produced before the worker says that it can, and the weights are held to the tokenizer.

The probe is a short English text; a model that belongs to its tokenizer finds it far likelier than chance, one that
does not finds it no better. Knows the runner alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.process import StartError
from worker_svc.runner import Runner

PROBE_TEXT = (
    "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius, and ice melts when it "
    "is warm. In the morning the children walk to school with their friends."
)

# Guessing evenly over V tokens costs ln V nats a token. Trained models spend a quarter to a half of that on the probe,
# models with another's tokenizer as much as guessing or more.
MAX_SHARE_OF_CHANCE = 0.75

# Fewer tokens than this say nothing.
_MIN_PROBE_TOKENS = 8


@dataclass(frozen=True)
class ProbeResult:
    """Mean loss in nats a token over `num_tokens` of the probe, beside that of guessing."""

    loss: float
    chance_loss: float
    num_tokens: int
    token_ns: int
    """Time of the step for each token that it computed."""

    @property
    def is_suspicious(self) -> bool:
        """Whether tokenizer and weights hardly belong together."""
        return self.num_tokens >= _MIN_PROBE_TOKENS and self.loss > MAX_SHARE_OF_CHANCE * self.chance_loss

    def __str__(self) -> str:
        return f"loss {self.loss:.2f} nats a token over {self.num_tokens} tokens; guessing costs {self.chance_loss:.2f}"


def warm_up(runner: Runner, probe_token_ids: Sequence[int]) -> ProbeResult:
    """Runs the probe as one prompt, samples a token after it, and leaves the runner empty.

    The probe is cut to what the runner's limits let through in one step. Raises StartError when the logits are not
    finite: such a worker could answer nobody.
    """
    limits = runner.limits.rows
    room = min(limits.max_model_len - 1, runner.limits.max_step_tokens, limits.num_blocks * limits.block_size)
    token_ids = [token_id for token_id in probe_token_ids if token_id < limits.vocab_size][: max(1, room)] or [0]
    num_blocks = -(-len(token_ids) // limits.block_size)
    sampling = types_pb2.SamplingParams(top_p=1, repetition_penalty=1, max_tokens=1, num_prompt_logprobs=0)
    begun_ns = time.perf_counter_ns()
    outcome = runner.run(
        worker_pb2.StepPlan(
            step=1,
            admissions=[
                worker_pb2.Admission(
                    slot=0,
                    token_ids=token_ids,
                    num_prompt_tokens=len(token_ids),
                    block_ids=range(num_blocks),
                    sampling=sampling,
                )
            ],
            row_slots=[0],
            row_starts=[0],
            row_counts=[len(token_ids)],
        )
    )
    token_ns = (time.perf_counter_ns() - begun_ns) // len(token_ids)
    runner.reset()
    if not any(group.listed.any() for group in outcome.sampled):
        raise StartError(
            "the model's logits hold NaN or infinity on plain text; the weights are damaged, or the precision is too "
            "narrow for them: try --dtype float32"
        )
    losses = [-stretch.logprobs.tokens for stretch in outcome.prompt_stretches]
    num_tokens = sum(map(len, losses))
    loss = float(np.concatenate(losses).mean()) if num_tokens else math.nan
    return ProbeResult(loss, math.log(limits.vocab_size), num_tokens, token_ns)
