"""What a worker counts: its steps and what came of them, its start, and the GPUs it sees.

Filled by the step thread, read by the one that answers scrapes. Knows plans and outcomes; must not know how they are
computed, and imports neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

from octavo import metrics_gpu
from octavo.internal.v1 import types_pb2, worker_pb2
from octavo.metrics import COUNT_BUCKETS, TOKEN_BUCKETS_S, MetricSet, counter, gauge, histogram
from octavo.phases import Phase
from worker_svc.observers import Step

STEP_TIME = histogram(
    "octavo_step_time_seconds", "Wall time of a step: plan in, tokens sent, result out.", TOKEN_BUCKETS_S, "model"
)
STEP_ROWS = histogram("octavo_step_rows", "Rows of a step.", COUNT_BUCKETS, "model")
STEP_TOKENS = histogram("octavo_step_tokens", "Tokens that a step computed.", COUNT_BUCKETS, "model")
TOKENS = counter(
    "octavo_worker_tokens_total",
    "Tokens computed, by kind: decode (rows of one token) or prefill (rows of more).",
    "model",
    "kind",
)
SAMPLED = counter("octavo_worker_sampled_tokens_total", "Tokens sampled, end tokens included.", "model")
IDLE = counter("octavo_worker_idle_seconds_total", "Time between two steps: waiting for a plan.", "model")
COPY = counter(
    "octavo_worker_copy_seconds_total",
    "Time in copies of KV blocks between the tiers, of those that ended with their step.",
    "model",
)
NUMERIC_ERRORS = counter(
    "octavo_numeric_errors_total", "Sequences ended because their logits held NaN or infinity.", "model"
)
REFUSED_SENDS = counter(
    "octavo_zmq_refused_sends_total", "Messages with tokens that a router's full or broken queue did not take.", "model"
)
UNDELIVERED = counter("octavo_undelivered_rows_total", "Rows of steps whose tokens no router took.", "model")
ATTACHMENTS = counter("octavo_worker_attachments_total", "Attachments to a scheduler, the first included.", "model")
START = gauge("octavo_worker_start_seconds", "Time that each phase of the start took, or has taken so far.", "phase")
INFO = gauge(
    "octavo_worker_info",
    "1; its labels say what is served: the numerics fingerprint and whether answers are batch-invariant.",
    "model",
    "replica",
    "numerics",
    "batch_invariant",
)

CATALOGUE = (
    STEP_TIME,
    STEP_ROWS,
    STEP_TOKENS,
    TOKENS,
    SAMPLED,
    IDLE,
    COPY,
    NUMERIC_ERRORS,
    REFUSED_SENDS,
    UNDELIVERED,
    ATTACHMENTS,
    START,
    INFO,
    *metrics_gpu.CATALOGUE,
)


class WorkerMetrics:
    """The metrics of the process. They exist from its first moment; `StepMetrics` once there is a model."""

    def __init__(self) -> None:
        self.set = MetricSet(CATALOGUE)

    def show_phases(self, phases: Sequence[Phase]) -> None:
        """How the start went, or goes."""
        self.set.replace(START, {(phase.name,): phase.seconds for phase in phases})

    def for_model(self, hello: worker_pb2.Hello) -> StepMetrics:
        """There is a model: what its steps do can be counted."""
        info = hello.model
        labels = (info.name, hello.name, info.numerics, str(info.batch_invariant).lower())
        self.set.replace(INFO, {labels: 1})
        return StepMetrics(self.set, info.name)

    def totals(self) -> str:
        """What there was from start to end, for the log."""
        total = self.set.total
        return (
            f"totals: {total(TOKENS):.0f} tokens computed, {total(SAMPLED):.0f} sampled, {total(UNDELIVERED):.0f} rows "
            f"undelivered, {total(NUMERIC_ERRORS):.0f} numeric errors, {total(IDLE):.0f} s idle"
        )


class StepMetrics:
    """An observer of the engine's steps."""

    def __init__(self, metrics: MetricSet, model: str) -> None:
        self._step_time = metrics.distribution(STEP_TIME, model)
        self._rows = metrics.distribution(STEP_ROWS, model)
        self._tokens = metrics.distribution(STEP_TOKENS, model)
        self._prefill = metrics.number(TOKENS, model, "prefill")
        self._decode = metrics.number(TOKENS, model, "decode")
        self._sampled = metrics.number(SAMPLED, model)
        self._idle = metrics.number(IDLE, model)
        self._copy = metrics.number(COPY, model)
        self._numeric_errors = metrics.number(NUMERIC_ERRORS, model)
        self._refused_sends = metrics.number(REFUSED_SENDS, model)
        self._undelivered = metrics.number(UNDELIVERED, model)
        self._attachments = metrics.number(ATTACHMENTS, model)
        self._last_end_ns: int | None = None

    def attached(self) -> None:
        self._attachments.add()
        self._last_end_ns = None

    def stepped(self, step: Step) -> None:
        counts = list(step.plan.row_counts)
        num_tokens, num_decode = sum(counts), counts.count(1)
        self._step_time.observe((step.ended_ns - step.begun_ns) / 1e9)
        self._rows.observe(len(counts))
        self._tokens.observe(num_tokens)
        self._decode.add(num_decode)
        self._prefill.add(num_tokens - num_decode)
        self._copy.add(step.outcome.copy_ns / 1e9)
        for group in step.outcome.sampled:
            num_failed = int((group.finish_reasons == types_pb2.FINISH_REASON_NUMERIC_ERROR).sum())
            self._numeric_errors.add(num_failed)
            self._sampled.add(len(group.plan_rows) - num_failed)
        self._refused_sends.add(step.num_refused_sends)
        self._undelivered.add(len(step.undelivered_rows))
        if self._last_end_ns is not None:
            self._idle.add(max(0, step.begun_ns - self._last_end_ns) / 1e9)
        self._last_end_ns = step.ended_ns

    def lost(self) -> None:
        self._last_end_ns = None
