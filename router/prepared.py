"""A request that passed every check, and the scheduler calls that it becomes.

Knows the internal protos; knows no text and no protocol of clients.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.internal.v1 import scheduler_pb2, types_pb2
from router.replies.output import ReplySpec
from router.requests import RequestOptions
from router.sampling import SamplingParams
from router.streams.types import StreamSpec
from router.text.model_text import ModelText

_LONGEST_DEADLINE_S = 100 * 365 * 86_400.0
"""Clients that mean "never" send millennia, which nanoseconds in 64 bits cannot hold."""


@dataclass(frozen=True)
class Prepared:
    """What is run."""

    answer_id: str
    """What the answer is called; the prompts of one request have one answer."""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    options: RequestOptions
    end_token_ids: tuple[int, ...]
    text: ModelText
    """The text side of its model."""
    arrived_at: float
    """When the request came, by the clock of the router's metrics."""
    traceparent: str = ""
    """The span that the request belongs to, where it came with one."""
    prompt_text: str | None = None
    """The prompt as text, where the request asked for an echo."""
    reply: ReplySpec | None = None
    """What a chat's answer may hold beside content; None where all text is content."""
    grammar: types_pb2.Grammar | None = None
    """What the answer must be, as workers take it; None leaves it free."""
    grammar_field: str = ""
    """Where the request said so."""
    position: int | None = None
    """Which of the request's prompts, where it has several."""

    @property
    def internal_id(self) -> str:
        """What we call it: no other prompt has this id."""
        return self.answer_id if self.position is None else f"{self.answer_id}-{self.position}"

    @property
    def shown_id(self) -> str:
        """What the client calls the request, or else what we call it."""
        return self.options.request_id or self.internal_id

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives that the worker reports with each token; None for no logprobs. Ranking needs the token's own."""
        ranks = self.params.best_of > self.params.n
        return 0 if ranks and self.params.logprobs is None else self.params.logprobs

    @property
    def prompt_logprob_positions(self) -> range | None:
        """Prompt positions whose logprobs are asked for. The prompt is the same for every choice."""
        return None if self.params.prompt_logprobs is None else range(1, len(self.prompt_ids))


def scheduler_call(prepared: Prepared, index: int, spec: StreamSpec) -> scheduler_pb2.GenerateRequest:
    """The part of one sequence's scheduler request that is the same for every attempt."""
    options, group_size = prepared.options, prepared.params.best_of
    call = scheduler_pb2.GenerateRequest(
        request_id=prepared.shown_id,
        model=options.model,
        adapter=options.adapter,
        task=types_pb2.TASK_GENERATE,
        prompt_token_ids=prepared.prompt_ids,
        sampling=_sampling(prepared, index),
        tenant=options.tenant,
        cache_salt=options.cache_salt,
        priority=options.priority,
        group_id=prepared.internal_id if group_size > 1 else "",
        group_size=group_size,
        stream_key=spec.stream_key,
        queue_events=options.queue_events,
    )
    if options.deadline_s is not None:
        call.deadline_ns = int(min(max(0.0, options.deadline_s), _LONGEST_DEADLINE_S) * 1e9)
    if spec.prompt_logprob_positions:
        call.sampling.num_prompt_logprobs = prepared.params.prompt_logprobs or 0
    return call


def _sampling(prepared: Prepared, index: int) -> types_pb2.SamplingParams:
    params = prepared.params
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=params.seed_of(index) % 2**64,
        bias_token_ids=[token_id for token_id, _ in params.logit_bias],
        bias_values=[bias for _, bias in params.logit_bias],
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        end_token_ids=() if params.ignore_eos else prepared.end_token_ids,
        stop_token_ids=params.stop_token_ids,
        num_logprobs=prepared.num_logprobs,
        grammar=prepared.grammar,
    )
