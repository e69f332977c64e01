"""What the scheduler counts: queues, steps, blocks and how sequences end.

Most of it the core has counted already: its statistics are read when somebody scrapes. Events add what statistics do
not hold: times in the queue, prefix look-ups, ends by reason. Knows the core's data; must not know gRPC or the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Set

from octavo.metrics import LATENCY_BUCKETS_S, Metric, MetricSet, counter, gauge, histogram
from scheduler_svc.core.statistics import ReplicaStatistics, Statistics
from scheduler_svc.core.types import Ended, Event, Finished, Scheduled
from scheduler_svc.parties import Call

QUEUE_TIME = histogram(
    "octavo_request_queue_time_seconds",
    "Each wait of a sequence, from its submission or preemption to its admission.",
    LATENCY_BUCKETS_S,
    "model",
)
RUNNING = gauge("octavo_num_requests_running", "Sequences in slots.", "model", "replica")
PREFILLING = gauge(
    "octavo_num_requests_prefilling",
    "Of those that run, sequences with prompt (or lost) tokens to compute.",
    "model",
    "replica",
)
WAITING = gauge("octavo_num_requests_waiting", "Sequences that wait, preempted ones included.", "model")
WAITING_TOKENS = gauge("octavo_num_waiting_tokens", "Known tokens of all waiting sequences.")
FOLLOWING = gauge(
    "octavo_num_requests_following", "Waiting sequences whose next blocks another one is about to compute."
)
KV_USAGE = gauge(
    "octavo_kv_cache_usage_perc",
    "Share of a tier's KV blocks in use, 1 being all: tier device counts those that running sequences hold, host those "
    "that are findable.",
    "model",
    "replica",
    "tier",
)
KV_BLOCKS = gauge(
    "octavo_kv_cache_blocks",
    "KV blocks by tier and state: used (by running sequences), cached (free, and findable by prefix), free.",
    "model",
    "replica",
    "tier",
    "state",
)
PREFIX_QUERIES = counter(
    "octavo_prefix_cache_queries_total", "Tokens of sequences at their first admission: all were looked up.", "model"
)
PREFIX_HITS = counter("octavo_prefix_cache_hits_total", "Of those, tokens found cached, in either tier.", "model")
HOST_HITS = counter(
    "octavo_host_cache_hits_total", "Tokens found in the host tier, at first and later admissions.", "model"
)
PREEMPTIONS = counter(
    "octavo_preemptions_total", "Preemptions by kind: what became of the blocks, recompute or swap.", "model", "kind"
)
RECOMPUTED = counter(
    "octavo_recomputed_tokens_total",
    "Tokens computed once before and lost: of preempted and of resumed sequences.",
    "model",
)
SWAPPED = counter(
    "octavo_swapped_blocks_total",
    "KV blocks copied between the tiers: direction out (device to host) or in.",
    "model",
    "direction",
)
STEPS = counter(
    "octavo_scheduler_steps_total", "Planned steps by what kept them from being bigger.", "model", "limited_by"
)
COMPUTED = counter("octavo_scheduler_computed_tokens_total", "Tokens of answered steps.", "model")
SAMPLED = counter("octavo_scheduler_sampled_tokens_total", "Tokens that answered steps sampled.", "model")
ENDS = counter(
    "octavo_scheduler_attempts_ended_total",
    "Attempts by how they ended: end_token, stop_token, length, numeric_error, grammar_error, cancelled (a client that "
    "left, a stop string, or an operator), replica_lost, tokens_not_delivered, deadline_passed.",
    "model",
    "reason",
)
REFUSALS = counter("octavo_scheduler_refusals_total", "Attempts that were not accepted, by reason.", "reason")
REPLICAS = gauge("octavo_replicas", "Attached replicas by state: ready, draining or stalled.", "model", "state")
SLOTS = gauge("octavo_replica_slots", "Sequences that may run at once.", "model", "replica")
LOAD_TOKENS = gauge(
    "octavo_replica_load_tokens", "Tokens that a replica's sequences still have to compute.", "model", "replica"
)
START_INTERVAL = gauge(
    "octavo_queue_start_interval_seconds", "Mean time between two starts of those that had to wait for room.", "model"
)
ROUTERS = gauge("octavo_scheduler_routers", "Registered routers.")
STARTING = gauge("octavo_scheduler_workers_starting", "Workers that have dialled in and are not ready yet.")

CATALOGUE = (
    QUEUE_TIME,
    RUNNING,
    PREFILLING,
    WAITING,
    WAITING_TOKENS,
    FOLLOWING,
    KV_USAGE,
    KV_BLOCKS,
    PREFIX_QUERIES,
    PREFIX_HITS,
    HOST_HITS,
    PREEMPTIONS,
    RECOMPUTED,
    SWAPPED,
    STEPS,
    COMPUTED,
    SAMPLED,
    ENDS,
    REFUSALS,
    REPLICAS,
    SLOTS,
    LOAD_TOKENS,
    START_INTERVAL,
    ROUTERS,
    STARTING,
)

_Counts = Counter[tuple[Metric, tuple[str, ...]]]

_FROM_STATISTICS = (HOST_HITS, PREEMPTIONS, RECOMPUTED, SWAPPED, STEPS, COMPUTED, SAMPLED)


class SchedulerMetrics:
    """An observer of the engine. Used in its event loop; `call` runs what a scrape needs there."""

    def __init__(self, call: Callable[[Callable[[], None]], None] = lambda refresh: refresh()) -> None:
        self.set = MetricSet(CATALOGUE, call=call)
        self._unadmitted: set[int] = set()
        # What replicas did that are gone: a counter must not fall when one leaves.
        self._gone: _Counts = Counter()

    def accepted(self, call: Call) -> None:
        self._unadmitted.add(call.sequence_id)

    def saw(self, event: Event, call: Call) -> None:
        match event:
            case Scheduled():
                self.set.distribution(QUEUE_TIME, call.model).observe(event.queue_ns / 1e9)
                if call.sequence_id in self._unadmitted:
                    self._unadmitted.discard(call.sequence_id)
                    self.set.number(PREFIX_QUERIES, call.model).add(call.num_tokens)
                    self.set.number(PREFIX_HITS, call.model).add(event.cached_tokens)
            case Finished():
                self._end(call, event.reason.name)
            case Ended():
                self._end(call, event.reason.value)

    def leaving(self, replica: ReplicaStatistics) -> None:
        self._gone.update(_counts(replica))

    def read(self, statistics: Statistics, stalled: Set[int], num_routers: int, num_starting: int) -> None:
        """Bring in what the core has counted; `stalled` are ids of replicas."""
        totals = Counter(self._gone)
        for replica in statistics.replicas:
            totals.update(_counts(replica))
        for metric in _FROM_STATISTICS:
            self.set.replace(metric, {labels: value for (of, labels), value in totals.items() if of is metric})
        self.set.replace(REFUSALS, {(_word(reason),): num for reason, num in statistics.num_refused.items()})
        self.set.replace(WAITING, {(model,): num for model, num in statistics.num_waiting.items()})
        intervals = statistics.start_interval_ns.items()
        self.set.replace(START_INTERVAL, {(model,): interval / 1e9 for model, interval in intervals})
        for metric, value in (
            (WAITING_TOKENS, statistics.num_waiting_tokens),
            (FOLLOWING, statistics.num_following),
            (ROUTERS, num_routers),
            (STARTING, num_starting),
        ):
            self.set.number(metric).set(value)
        self._read_replicas(statistics.replicas, stalled)

    def _read_replicas(self, replicas: Iterable[ReplicaStatistics], stalled: Set[int]) -> None:
        shown = list(replicas)
        for metric, name in (
            (RUNNING, "num_running"),
            (PREFILLING, "num_prefilling"),
            (SLOTS, "num_slots"),
            (LOAD_TOKENS, "load_tokens"),
        ):
            self.set.replace(metric, {(each.model, each.name): getattr(each, name) for each in shown})
        states = Counter((each.model, _state(each, stalled)) for each in shown)
        self.set.replace(REPLICAS, {labels: float(num) for labels, num in states.items()})
        self.set.replace(KV_USAGE, {key: value for each in shown for key, value in _usage(each)})
        self.set.replace(KV_BLOCKS, {key: value for each in shown for key, value in _blocks(each)})

    def _end(self, call: Call, reason: str) -> None:
        self._unadmitted.discard(call.sequence_id)
        self.set.number(ENDS, call.model, _word(reason)).add()


def _counts(replica: ReplicaStatistics) -> _Counts:
    """A replica's counters as samples, which add up over the replicas of a model."""
    model = replica.model
    found: _Counts = Counter(
        {
            (HOST_HITS, (model,)): replica.num_host_cached_tokens,
            (RECOMPUTED, (model,)): replica.num_recomputed_tokens,
            (SWAPPED, (model, "out")): replica.num_demoted_blocks,
            (SWAPPED, (model, "in")): replica.num_promoted_blocks,
            (COMPUTED, (model,)): replica.num_computed_tokens,
            (SAMPLED, (model,)): replica.num_sampled_tokens,
            (PREEMPTIONS, (model, "recompute")): 0,
            (PREEMPTIONS, (model, "swap")): 0,
        }
    )
    for kind, num in replica.num_preemptions_by_kind.items():
        found[PREEMPTIONS, (model, kind)] += num
    for limit, num in replica.num_steps_by_limit.items():
        found[STEPS, (model, _word(limit))] += num
    return found


def _state(replica: ReplicaStatistics, stalled: Set[int]) -> str:
    if replica.replica_id in stalled:
        return "stalled"
    return "draining" if replica.is_draining else "ready"


def _usage(replica: ReplicaStatistics) -> Iterator[tuple[tuple[str, str, str], float]]:
    model, name = replica.model, replica.name
    yield (model, name, "device"), replica.num_used_blocks / replica.num_blocks
    if replica.num_host_blocks:
        yield (model, name, "host"), replica.num_cached_host_blocks / replica.num_host_blocks


def _blocks(replica: ReplicaStatistics) -> Iterator[tuple[tuple[str, str, str, str], float]]:
    model, name = replica.model, replica.name
    yield (model, name, "device", "used"), replica.num_used_blocks
    yield (model, name, "device", "cached"), replica.num_cached_blocks
    yield (model, name, "device", "free"), replica.num_free_blocks - replica.num_cached_blocks
    if replica.num_host_blocks:
        yield (model, name, "host", "cached"), replica.num_cached_host_blocks
        yield (model, name, "host", "free"), replica.num_host_blocks - replica.num_cached_host_blocks


def _word(text: str) -> str:
    """A reason as a label value: `token budget` is token_budget."""
    return text.lower().replace(" ", "_")
