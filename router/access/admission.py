"""What a request may ask for and how much of it: the front door's rules for the caller of the present task.

Checks the caps of `AccessOptions` before anything is tokenized, puts tenant, priority and deadline where the scheduler
finds them, and keeps the tenant's rates. Knows the shapes of `router.requests`; knows no protocol.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from router.access.gate import CALLER
from router.access.key_file import TenantLimits
from router.access.keyring import Caller, Keyring
from router.access.options import AccessOptions
from router.access.rates import RateLimiter
from router.errors import InvalidRequest, show_value
from router.requests import ChatPrompt, CompletionPrompt, Event, GenerationRequest, RequestOptions, TextDelta
from router.sampling import SamplingRequest
from router.structured.spec import GrammarSpec


class Admission:
    """The rules of one router."""

    def __init__(
        self,
        options: AccessOptions | None = None,
        keyring: Keyring | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options or AccessOptions()
        base = TenantLimits(
            self._options.tenant_requests_per_minute,
            self._options.tenant_tokens_per_minute,
            self._options.tenant_max_concurrent_requests,
        )
        self._limits_of = (lambda tenant: base) if keyring is None else (lambda t: keyring.limits_of(t).over(base))
        self._rates = RateLimiter(self._limits_of, clock)

    def admit(self, request: GenerationRequest) -> GenerationRequest:
        """The request as the caller may have it, counted. Raises InvalidRequest, and Exhausted over a rate."""
        caller = CALLER.get()
        check_caps(request, self._options)
        options = self._place(request.options, caller)
        self._rates.admit(caller.tenant)
        return replace(request, options=options)

    def check_grammar(self, grammar: GrammarSpec) -> None:
        """Raises InvalidRequest for a grammar that is too long; those that tools make are known late."""
        _check_grammar(grammar, self._options)

    @contextlib.contextmanager
    def running(self, tenant: str, num_prompt_tokens: Sequence[int]) -> Iterator[None]:
        """A request with prompts of these lengths runs in this block, its prompts counted.

        Raises InvalidRequest for a prompt that is too long, Exhausted over a rate or where as many run as may.
        """
        limit = self._options.max_prompt_tokens
        for index, num in enumerate(num_prompt_tokens):
            field = "prompt" if len(num_prompt_tokens) == 1 else f"prompt[{index}]"
            if limit is not None and num > limit:
                raise InvalidRequest(
                    field, f"{field} has {num} tokens; this server takes {limit} (--max-prompt-tokens)"
                )
        with self._rates.running(tenant):
            self._rates.charge_prompt(tenant, sum(num_prompt_tokens))
            yield

    def metered(self, tenant: str, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        """The same events, their tokens counted as they come; as they are where nobody counts."""
        return self._meter(tenant, events) if self._rates.counts_tokens(tenant) else events

    async def _meter(self, tenant: str, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
        async with contextlib.aclosing(events):
            async for event in events:
                if isinstance(event, TextDelta) and event.token_ids:
                    self._rates.charge_output(tenant, len(event.token_ids))
                yield event

    def _place(self, options: RequestOptions, caller: Caller) -> RequestOptions:
        """Whose it is, and where among others it may stand."""
        asked, allowed = options.priority, caller.priorities
        if isinstance(asked, int) and not isinstance(asked, bool):  # anything else is refused with the other fields
            if asked == 0:
                options = replace(options, priority=min(max(0, allowed.best), allowed.worst))
            elif not allowed.best <= asked <= allowed.worst:
                whose = " for this API key" if caller.key_id else ""
                raise InvalidRequest(
                    "priority",
                    f"priority must be in [{allowed.best}, {allowed.worst}]{whose}, got {show_value(asked)}",
                )
        times = [time_s for time_s in (options.deadline_s, self._options.request_timeout) if time_s is not None]
        return replace(options, tenant=caller.tenant, deadline_s=min(times, default=None))


@dataclass(frozen=True)
class _Cap:
    field: str
    flag: str
    limit: int
    unit: str = ""

    def check(self, value: object) -> None:
        """Refuses a count above the limit; what is no count is left to the field's own rules."""
        if isinstance(value, int) and not isinstance(value, bool) and value > self.limit:
            unit = f" {self.unit}" if self.unit else ""
            raise InvalidRequest(
                self.field,
                f"{self.field} must be at most {self.limit}{unit} at this server ({self.flag}), "
                f"got {show_value(value)}",
            )


def check_caps(request: GenerationRequest, options: AccessOptions) -> None:
    """Raise InvalidRequest for the first thing of which a request asks too much. Types are checked elsewhere."""
    sampling = request.sampling
    _Cap("n", "--max-n", options.max_n).check(sampling.n)
    _Cap("best_of", "--max-n", options.max_n).check(sampling.best_of)
    _Cap("logprobs", "--max-logprobs", options.max_logprobs).check(sampling.logprobs)
    _Cap("prompt_logprobs", "--max-logprobs", options.max_logprobs).check(sampling.prompt_logprobs)
    _check_stop(sampling.stop, options)
    if isinstance(request.prompt, ChatPrompt):
        messages, tools = request.prompt.messages, request.prompt.options.tools
        _Cap("messages", "--max-messages", options.max_messages, "messages").check(_length(messages))
        _Cap("tools", "--max-tools", options.max_tools, "tools").check(_length(tools))
    elif isinstance(request.prompt, CompletionPrompt):
        num_prompts = _num_prompts(request.prompt.value)
        _Cap("prompt", "--max-prompts", options.max_prompts, "prompts").check(num_prompts)
        _check_answers(1 if num_prompts is None else num_prompts, sampling, options)
    if request.grammar is not None:
        _check_grammar(request.grammar, options)


def _check_grammar(grammar: GrammarSpec, options: AccessOptions) -> None:
    num_bytes = len(grammar.text.encode())
    _Cap(grammar.field, "--max-grammar-bytes", options.max_grammar_bytes, "bytes").check(num_bytes)


def _check_answers(num_prompts: int, sampling: SamplingRequest, options: AccessOptions) -> None:
    """All answers to all prompts: each is a call to the scheduler."""
    counts: tuple[object, ...] = (sampling.n, sampling.best_of)
    num_each = max((count for count in counts if isinstance(count, int)), default=1)
    limit = max(options.max_prompts, options.max_n)
    if num_prompts * num_each > limit:
        raise InvalidRequest(
            "n",
            f"n: {num_each} answers to each of {num_prompts} prompts are {num_prompts * num_each}; at most {limit} are "
            "made in one request at this server (--max-prompts, --max-n); send fewer prompts at a time",
        )


def _check_stop(stop: object, options: AccessOptions) -> None:
    if isinstance(stop, str):
        _Cap("stop", "--max-stop-chars", options.max_stop_chars, "characters").check(len(stop))
    elif isinstance(stop, (list, tuple)):
        _Cap("stop", "--max-stop-strings", options.max_stop_strings, "strings").check(len(stop))
        for index, item in enumerate(stop):
            field = f"stop[{index}]"
            _Cap(field, "--max-stop-chars", options.max_stop_chars, "characters").check(_length(item))


def _num_prompts(value: object) -> int | None:
    """A list of numbers is one prompt, of token ids; any other list holds prompts."""
    if not isinstance(value, (list, tuple)) or (value and isinstance(value[0], int)):
        return None
    return len(value)


def _length(value: object) -> int | None:
    return len(value) if isinstance(value, (list, tuple, str)) else None
