"""What a request may be answered with, token by token, as the simulated model has it.

A steadfast model says the same whatever happens. A fickle one chooses anew in each attempt, as real ones may without
batch invariance: tokens of two attempts then belong together only where the later continued the earlier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.internal.v1 import types_pb2
from router.streams.types import Finish
from scheduler_svc.core.plan import Admission
from scheduler_svc.core.types import ReplicaSpec
from tests.fakes.simulated_replica import SimulatedReplica, next_state, sampled_token, states_of


def chosen_token(state: int, attempt: int, vocab_size: int, *, is_fickle: bool) -> int:
    """The token after `state`, in that attempt."""
    return sampled_token(next_state(state, attempt) if is_fickle else state, vocab_size)


class SimulatedModel(SimulatedReplica):
    """A replica that holds a steadfast or a fickle model."""

    def __init__(self, spec: ReplicaSpec, vocab_size: int, *, is_fickle: bool) -> None:
        super().__init__(spec, vocab_size)
        self._is_fickle = is_fickle

    def choose(self, admission: Admission, state: int) -> int:
        return chosen_token(state, admission.attempt, self.vocab_size, is_fickle=self._is_fickle)


@dataclass(frozen=True)
class Model:
    """What decides an answer beside its request."""

    vocab_size: int
    is_fickle: bool
    longest_sequence: int
    """Tokens at which any sequence ends, prompt included."""


class Answer:
    """Follows one answer. Raises AssertionError, naming the position, for a token or an end that it cannot have."""

    def __init__(self, model: Model, prompt: Sequence[int], sampling: types_pb2.SamplingParams) -> None:
        self._model, self._sampling = model, sampling
        self._state = deque(states_of(prompt), maxlen=1)[0]
        self._num_most = min(sampling.max_tokens, model.longest_sequence - len(prompt))
        self._attempt = 1  # of the last token
        self.num_tokens = 0

    def take(self, token_ids: Sequence[int], attempts: range) -> None:
        """The next tokens, of one of these attempts."""
        for token_id in token_ids:
            choices = self._choices(attempts)
            place = f"position {self.num_tokens}"
            assert token_id in choices, f"{place} holds {token_id}, by attempt it is {choices}"
            assert token_id not in self._sampling.end_token_ids, f"{place} holds the end token {token_id}"
            assert token_id not in self._sampling.stop_token_ids, f"{place} holds the stop token {token_id}"
            self._attempt = choices[token_id]
            self._state = next_state(self._state, token_id)
            self.num_tokens += 1
            assert self.num_tokens <= self._num_most, f"{place}: there are {self._num_most} tokens at most"

    def end(self, finish: Finish, final_token_id: int | None, attempts: range) -> None:
        """The end of a complete answer."""
        place, choices = f"the end after {self.num_tokens} tokens", self._choices(attempts)
        if finish is Finish.LENGTH:
            assert self.num_tokens == self._num_most, f"{place}: length is {self._num_most}"
            return
        assert self.num_tokens < self._num_most, f"{place}: {finish} at full length"
        stops, ends = set(self._sampling.stop_token_ids), set(self._sampling.end_token_ids)
        possible = set(choices) & (ends if finish is Finish.END_TOKEN else stops - ends)
        assert possible, f"{place}: {finish}, but by attempt it goes on with {choices}"
        assert final_token_id is None or final_token_id in possible, f"{place}: {final_token_id} of {possible}"

    def _choices(self, attempts: range) -> dict[int, int]:
        """The tokens that may follow, each with the earliest attempt that chooses it. No attempt follows a later."""
        model, choices = self._model, dict[int, int]()
        for attempt in range(max(self._attempt, attempts.start), attempts.stop):
            token_id = chosen_token(self._state, attempt, model.vocab_size, is_fickle=model.is_fickle)
            choices.setdefault(token_id, attempt)
        return choices
