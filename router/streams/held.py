"""What is held of one sequence's answer: its tokens, its prompt's logprobs, and what was said of its end.

Pure. Judges a delta by what it adds; knows no attempt, no phase and no time, which are `stream`'s.
"""

from __future__ import annotations

from router.streams.parts import PromptGate
from router.streams.types import Finish, Finished, NewTokens, Output, PromptDelta, StreamSpec, TokenDelta


class HeldAnswer:
    """Grows by deltas; what it has taken once it never loses."""

    def __init__(self, spec: StreamSpec) -> None:
        self._spec = spec
        self.token_ids: list[int] = []
        self.prompt = PromptGate(spec.prompt_logprob_positions)
        self.finish: Finish | None = None
        self.final_token_id: int | None = None
        self._sealed = False  # the worker's own word that this is the end has come
        self._told_tokens: int | None = None

    @property
    def counts(self) -> tuple[int, int]:
        """Output tokens, and the first prompt position without logprobs."""
        return len(self.token_ids), self.prompt.next_position

    @property
    def num_known_tokens(self) -> int:
        """Output tokens that there are, those included that the scheduler's last word came before."""
        return max(len(self.token_ids), self._told_tokens or 0)

    @property
    def is_whole(self) -> bool:
        """Whether the sequence is complete by what is held here; then it is never submitted again."""
        if self.prompt.missing:
            return False
        told = self._told_tokens is not None and len(self.token_ids) >= self._told_tokens
        return told or self._sealed or len(self.token_ids) >= self._spec.max_tokens

    @property
    def was_told(self) -> bool:
        """Whether the scheduler has said that this is the end."""
        return self._told_tokens is not None

    @property
    def is_nameless(self) -> bool:
        """Whether a stop token ended it and it is not known which."""
        return self.finish is Finish.STOP_TOKEN and self.final_token_id is None

    @property
    def grows_by_tokens_alone(self) -> bool:
        """Whether its next tokens need nothing beside them, and neither word of the end has come."""
        is_over = self._sealed or self._told_tokens is not None or self.finish is not None
        return not (is_over or self._spec.wants_logprobs or self.prompt.missing)

    def misses_before(self, delta: TokenDelta) -> bool:
        """Whether something was lost before this delta, or on its way with it."""
        if delta.position > len(self.token_ids):
            return True
        if not self._spec.wants_logprobs or not delta.token_ids:
            return False
        return delta.logprobs is None or len(delta.logprobs) != len(delta.token_ids)

    def may_be_overtaken_by(self, delta: TokenDelta) -> bool:
        """Whether what misses before this delta begins with tokens that its replica was not to send."""
        return len(self.token_ids) < min(delta.position, delta.entry_position)

    def add(self, delta: TokenDelta) -> NewTokens | None:
        """Take what is new of a delta that nothing misses before; None where nothing is."""
        held = len(self.token_ids)
        skip = held - delta.position
        room = 0 if self._sealed else self._spec.max_tokens - held
        fresh = delta.token_ids[skip : skip + room]
        if not fresh:
            return None
        self.token_ids.extend(fresh)
        return NewTokens(held, fresh, delta.logprobs[skip : skip + len(fresh)] if delta.logprobs is not None else None)

    def seal(self, delta: TokenDelta) -> bool:
        """Take the worker's word of the end, where everything before it is held. Whether it said one."""
        if delta.finish is None or delta.position + len(delta.token_ids) != len(self.token_ids):
            return False
        self.finish, self.final_token_id, self._sealed = delta.finish, delta.final_token_id, True
        return True

    def told(self, event: Finished) -> None:
        """Take the scheduler's word of the end."""
        self._told_tokens = event.num_output_tokens
        self.finish = self.finish or event.finish
        if self.final_token_id is None and event.finish is Finish.STOP_TOKEN and len(self._spec.stop_token_ids) == 1:
            (self.final_token_id,) = self._spec.stop_token_ids

    def forget_told(self) -> None:
        """Another attempt begins: only the worker's own word of the end stays."""
        if not self._sealed:
            self.finish = self.final_token_id = None
        self._told_tokens = None

    def add_prompt(self, delta: PromptDelta) -> list[Output] | None:
        """What may go out with these logprobs of the prompt; None where some are missing before them."""
        return None if delta.start > self.prompt.next_position else self.prompt.logprobs(delta)
