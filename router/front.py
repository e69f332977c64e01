"""The front door both surfaces stand behind: checks a request against what is served now, and runs it.

Owns the set of live requests, so that a drain can wait for it, and passes the scheduler's state on to their
sequences. Knows no protocol of clients: it takes and gives the shapes of `router.requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from octavo.internal.v1 import scheduler_pb2, types_pb2
from octavo.phases import Phase
from router.access.admission import Admission
from router.access.key_file import PRIORITY_MAX, PRIORITY_MIN
from router.errors import ErrorKind, InvalidRequest, RouterError, Unavailable, check_text, show_value
from router.generation import StreamContext, run
from router.merging import merge
from router.metrics import RouterMetrics
from router.models.catalogue import Catalogue
from router.prepared import Prepared
from router.prompting import BuiltPrompt, build_prompts, is_quick
from router.ranking import likeliest
from router.readiness import ListedModel, Readiness, judge, list_aliases, summarize
from router.requests import ChatPrompt, CompletionPrompt, Event, GenerationRequest, RequestOptions, clean_request_id
from router.sampling import ModelLimits, SamplingParams, check_sampling
from router.streams.scheduler_client import SchedulerClient, SchedulerState
from router.streams.sequence import SequenceDriver
from router.streams.token_inlet import StreamKeys, TokenInlet
from router.streams.types import Output, StreamSpec
from router.structured.checker import GrammarChecker, with_thinking
from router.text.model_text import ModelText
from router.tokenizing import Tokenized, detokenize, tokenize
from router.traces import INCOMING, RequestTracer
from router.worker_starts import WorkerStarts

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SALT_CHARS = 256
_TOKENIZING_THREADS = 2


@dataclass(frozen=True)
class Helpers:
    """What the front door asks and tells on the way of a request. The tracer is None where nothing is traced."""

    metrics: RouterMetrics = field(default_factory=RouterMetrics)
    tracer: RequestTracer | None = None
    admission: Admission = field(default_factory=Admission)
    grammars: GrammarChecker = field(default_factory=GrammarChecker)


class FrontDoor:
    """One per router. Create it in a running event loop; texts come into the catalogue once they are read.

    `seed` makes the seeds repeatable that requests without one get; None draws them at random.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        scheduler: SchedulerClient,
        inlet: TokenInlet,
        helpers: Helpers,
        *,
        recovery_timeout_s: float,
        seed: int | None = None,
    ) -> None:
        self.catalogue = catalogue
        self.draining = False
        self.own_phases: Callable[[], Sequence[Phase]] = lambda: ()
        self.metrics = helpers.metrics
        self._admission = helpers.admission
        self._grammars = helpers.grammars
        self._scheduler = scheduler
        self._inlet = inlet
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._threads = ThreadPoolExecutor(_TOKENIZING_THREADS, thread_name_prefix="tokenize")
        self._drivers: set[SequenceDriver] = set()
        self._num_live = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._context = StreamContext(
            draw_key=StreamKeys().draw,
            make_driver=self._make_driver,
            recovery_timeout_s=recovery_timeout_s,
            token_endpoint=inlet.endpoint,
            metrics=self.metrics,
            tracer=helpers.tracer,
        )
        self._starts = WorkerStarts()
        scheduler.on_change(lambda state: self._starts.observe(state.starting))
        scheduler.on_change(lambda state: self.catalogue.take_told(state.aliases))
        scheduler.on_change(self._tell_drivers)

    @property
    def num_live(self) -> int:
        """Requests between their acceptance and their end."""
        return self._num_live

    def readiness(self) -> Readiness:
        """Whether a token of any model can be produced now, and how it is with each."""
        phases = [("router", phase) for phase in self.own_phases()] + self._starts.snapshot()
        reasons = {name: self._why_not(name) for name in self.catalogue.names}
        return summarize(reasons, self._scheduler.state, phases)

    def models(self) -> list[ListedModel]:
        """What this router serves, ready or not, as far as workers have described it; aliases behind the models."""
        served = self._scheduler.state.models
        found = [
            ListedModel(name, served[name].info, is_ready=not self._why_not(name))
            for name in self.catalogue.names
            if name in served
        ]
        return [*found, *list_aliases(found, self.catalogue.aliases)]

    async def tokenize(self, model: str, prompt: CompletionPrompt | ChatPrompt) -> Tokenized:
        """The ids of a prompt. Raises RouterError; needs no replica that is ready."""
        text, info = self._require_info(model)
        return await self.in_thread(lambda: tokenize(prompt, text, info.vocab_size, info.max_model_len))

    async def detokenize(self, model: str, ids: object, *, skip_special_tokens: bool) -> str:
        """The text of ids. Raises RouterError; needs no replica that is ready."""
        text, info = self._require_info(model)
        return await self.in_thread(
            lambda: detokenize(ids, text, info.vocab_size, skip_special_tokens=skip_special_tokens)
        )

    def refused(self, error: RouterError, request_id: str) -> None:
        """A request ended with an error, before or while it ran. `request_id` as its client knows it, "" for none."""
        self.metrics.refused(error)
        if request_id and not error.has_run:  # by its kind alone: fields and messages may repeat what a client wrote
            _LOG.info("request %s: error %s", request_id, error.kind.value, extra={"request_id": request_id})

    async def wait_idle(self) -> None:
        """Return when no request is live."""
        await self._idle.wait()

    def end_all(self, reason: str) -> None:
        """Let every sequence fail as unavailable; the requests end as soon as their readers have taken that."""
        for driver in tuple(self._drivers):
            driver.fail(ErrorKind.UNAVAILABLE, reason)

    async def prepare(self, request: GenerationRequest) -> list[Prepared]:
        """Check everything, before anything runs. Raises RouterError; one bad prompt refuses them all."""
        arrived_at = self.metrics.clock()
        self.catalogue.model_of(request.options.model)  # an unknown name costs nobody a part of their rate
        request = self._admission.admit(request)
        request = self.catalogue.route(request, lambda model: not self._why_not(model))
        text, served = self._require_ready(request.options.model)
        request = replace(request, options=self._check_options(request.options))

        def build() -> list[BuiltPrompt]:
            info = served.info
            return build_prompts(request, text, vocab_size=info.vocab_size, max_model_len=info.max_model_len)

        prompts = build() if is_quick(request) else await self.in_thread(build)
        grammars = [await self._check_grammar(built, served.info) for built in prompts]
        answer_id = secrets.token_hex(12)
        return [
            Prepared(
                answer_id=answer_id,
                prompt_ids=built.prompt.token_ids,
                params=_params(request, text, served, len(built.prompt.token_ids), self._seeds.getrandbits(63)),
                options=request.options,
                end_token_ids=tuple(served.info.end_token_ids),
                arrived_at=arrived_at,
                traceparent=INCOMING.get(),
                prompt_text=built.prompt.text if request.sampling.echo else None,
                reply=built.reply,
                grammar=grammar,
                grammar_field="" if built.grammar is None else built.grammar.field,
                text=text,
                position=None if len(prompts) == 1 else position,
            )
            for position, (built, grammar) in enumerate(zip(prompts, grammars, strict=True))
        ]

    async def in_thread(self, work: Callable[[], T]) -> T:
        """The result of work on texts, done beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @contextlib.asynccontextmanager
    async def answer(self, prepared: Prepared) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """Run it; leaving the block, by whatever way, cancels what is still running."""
        with self._admission.running(prepared.options.tenant, [len(prepared.prompt_ids)]):
            async with self._answer(prepared) as events:
                yield events

    @contextlib.asynccontextmanager
    async def _answer(self, prepared: Prepared) -> AsyncIterator[AsyncGenerator[Event, None]]:
        if self.draining:
            raise Unavailable(self.readiness().reason)
        self._num_live += 1
        self._idle.clear()
        try:
            events = self._admission.metered(prepared.options.tenant, run(prepared, self._context))
            if prepared.params.best_of > prepared.params.n:
                events = likeliest(events, prepared.params)
            async with contextlib.aclosing(events):
                yield events
        except RouterError as error:
            error.has_run = True
            raise
        finally:
            self._num_live -= 1
            if self._num_live == 0:
                self._idle.set()

    @contextlib.asynccontextmanager
    async def answer_all(self, prompts: Sequence[Prepared]) -> AsyncIterator[AsyncGenerator[tuple[int, Event], None]]:
        """Run several prompts side by side; events come with the position of their prompt."""
        async with contextlib.AsyncExitStack() as stack:
            num_tokens = [len(prepared.prompt_ids) for prepared in prompts]
            stack.enter_context(self._admission.running(prompts[0].options.tenant, num_tokens))
            runs = [await stack.enter_async_context(self._answer(prepared)) for prepared in prompts]
            async with contextlib.aclosing(merge(runs)) as events:
                yield events

    async def close(self) -> None:
        """Ends what works beside the event loop."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        await self._grammars.close()

    def _why_not(self, model: str) -> str:
        """Why no token of the model can be produced now; empty when one can."""
        text = self.catalogue.text(model)
        known_hash = None if text is None else text.tokenizer_hash
        return judge(model, known_hash, self._scheduler.state, draining=self.draining)

    def _require_info(self, model: str) -> tuple[ModelText, types_pb2.ModelInfo]:
        name = self.catalogue.model_of(model)
        served, text = self._scheduler.state.models.get(name), self.catalogue.text(name)
        if served is None or text is None:
            raise Unavailable(f"not ready: {self._why_not(name)}")
        return text, served.info

    def _require_ready(self, model: str) -> tuple[ModelText, scheduler_pb2.ServedModel]:
        reason, text = self._why_not(model), self.catalogue.text(model)
        if reason or text is None:
            raise Unavailable(f"not ready: {reason}")
        return text, self._scheduler.state.models[model]

    def _check_options(self, options: RequestOptions) -> RequestOptions:
        if options.adapter:
            raise InvalidRequest("adapter", f"adapter {show_value(options.adapter)}: this server has no adapters")
        if len(check_text("cache_salt", options.cache_salt)) > MAX_SALT_CHARS:
            raise InvalidRequest(
                "cache_salt",
                f"cache_salt must have at most {MAX_SALT_CHARS} characters, got {len(options.cache_salt)}",
            )
        priority: object = options.priority
        is_number = isinstance(priority, int) and not isinstance(priority, bool)
        if not is_number or not PRIORITY_MIN <= options.priority <= PRIORITY_MAX:
            raise InvalidRequest(
                "priority",
                f"priority must be an integer in [{PRIORITY_MIN}, {PRIORITY_MAX}], got {show_value(priority)}",
            )
        return replace(options, request_id=clean_request_id(options.request_id))

    async def _check_grammar(self, built: BuiltPrompt, info: types_pb2.ModelInfo) -> types_pb2.Grammar | None:
        """The grammar as workers take it. Raises RouterError."""
        if (spec := built.grammar) is None:
            return None
        if not info.end_token_ids:
            raise InvalidRequest(
                spec.field, f"{spec.field}: the model has no end token, so nothing could end the answer"
            )
        self._admission.check_grammar(spec)
        found = await self._grammars.check(spec)
        return found if built.thinking is None else with_thinking(found, built.thinking)

    def _make_driver(
        self, spec: StreamSpec, call: scheduler_pb2.GenerateRequest, deliver: Callable[[Output], None]
    ) -> SequenceDriver:
        driver = SequenceDriver(spec, call, self._scheduler, self._inlet, deliver)
        self._drivers.add(driver)
        driver.on_end = lambda: self._drivers.discard(driver)
        return driver

    def _tell_drivers(self, state: SchedulerState) -> None:
        for driver in tuple(self._drivers):
            driver.availability(state)


def _params(
    request: GenerationRequest,
    text: ModelText,
    served: scheduler_pb2.ServedModel,
    num_prompt_tokens: int,
    drawn_seed: int,
) -> SamplingParams:
    limits = ModelLimits(served.info.vocab_size, served.info.max_model_len, served.max_cached_tokens or None)
    return check_sampling(
        request.sampling,
        limits,
        text.defaults,
        prompt_tokens=num_prompt_tokens,
        is_chat=isinstance(request.prompt, ChatPrompt),
        drawn_seed=drawn_seed,
    )
