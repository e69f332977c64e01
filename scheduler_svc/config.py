"""The scheduler's options, each with its default and a sentence; limits of replicas come from the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.common_options import InternalTlsOptions, ObservedOptions, ScrapedOptions
from octavo.options import Limits, OptionError, check_values, option

_AT_LEAST_ONE = Limits(minimum=1)


@dataclass(frozen=True)
class SchedulerConfig(ObservedOptions, InternalTlsOptions, ScrapedOptions):
    """One scheduler process: where it listens and how it fills a step."""

    host: str = option(
        "127.0.0.1", "Address the scheduler listens on, for routers and workers, or unix:PATH of a socket file."
    )
    port: int = option(8002, "Port the scheduler listens on; 0 picks a free one.", limits=Limits(0, 65535))
    max_num_seqs: int | None = option(
        None,
        "Most sequences that run at once on a replica; the worker's limit when unset.",
        limits=_AT_LEAST_ONE,
    )
    max_num_batched_tokens: int | None = option(
        None, "Most tokens computed in one step; the worker's limit when unset.", limits=_AT_LEAST_ONE
    )
    enable_prefix_caching: bool = option(True, "Reuse the cached blocks of prompts that begin alike.")
    share_prefixes_between_tenants: bool = option(
        False,
        "Let tenants find each other's cached prompts; whoever guesses one can tell by the time that it was there.",
    )
    max_waiting_requests: int = option(
        2048, "Requests that may wait; one more is refused with a delay to retry after.", limits=_AT_LEAST_ONE
    )
    max_waiting_tokens: int = option(
        4_000_000,
        "Prompt tokens that waiting requests may hold together; beyond it requests are refused.",
        limits=_AT_LEAST_ONE,
    )
    max_waiting_requests_per_tenant: int | None = option(
        None, "Requests of one tenant that may wait; as many as of all when unset.", limits=_AT_LEAST_ONE
    )
    max_waiting_tokens_per_tenant: int | None = option(
        None, "Prompt tokens that one tenant's waiting requests may hold together.", limits=_AT_LEAST_ONE
    )
    scheduling_policy: str = option(
        "priority",
        "Who goes first: fcfs, who came first; priority, the smaller number, and better work displaces worse; fair, "
        "the tenant that was served least for its weight.",
        choices=("fcfs", "priority", "fair"),
    )
    tenant_weights: str = option(
        "", "Shares of tenants under the fair policy, as name=weight,...; a tenant that is not named has 1."
    )
    aging_time: float = option(
        60.0,
        "The wait that is worth one step of priority, so that nobody waits for ever.",
        kind="seconds",
        limits=Limits(minimum=0.001),
    )
    preemption_mode: str = option(
        "auto",
        "What becomes of a preempted sequence's KV blocks where the worker has --swap-space: recompute, swap, or auto, "
        "whichever takes less time by the replica's own steps.",
        choices=("recompute", "swap", "auto"),
    )
    target_inter_token_latency_ms: float | None = option(
        None,
        "Milliseconds between two tokens of a sequence to aim at: prompts are computed in chunks small enough for it.",
        limits=Limits(minimum=0.001),
    )
    max_prefill_tokens: int | None = option(
        None,
        "Most prompt tokens in a step while sequences decode; chosen from measured steps when unset.",
        limits=_AT_LEAST_ONE,
    )
    expected_output_tokens: int = option(
        256,
        "Tokens that an answer is thought to get before others have told: while KV blocks are short, room is kept for "
        "what runs to grow so far. 0 keeps none at first.",
        limits=Limits(minimum=0),
    )
    flight_recorder_size: int = option(
        32 * 2**20,
        "Memory in which the scheduler's inputs are recorded for `octavo ctl dump` and `octavo replay`; 0 records "
        "nothing.",
        kind="bytes",
        limits=Limits(minimum=0),
    )
    record_tokens: bool = option(False, "Record token ids in place of salted hashes: prompts can be read from a dump.")
    token_networks: str = option(
        "",
        "Networks (CIDR, comma-separated) beside a router's own address that it may name for its tokens.",
    )
    check_laws: bool = option(False, "Check every law of the scheduler after each transition (slow).")
    stats_interval: float = option(
        10.0,
        "Time between two lines of the log that say how much is computed, runs and waits, while something does; 0 "
        "writes none.",
        kind="seconds",
        limits=Limits(minimum=0),
    )

    def __post_init__(self) -> None:
        check_values(self)
        self.check_internal_tls()
        try:
            tenant_weights(self.tenant_weights)
        except ValueError as error:
            raise OptionError("--tenant-weights", self.tenant_weights, str(error), "Use alice=2,bob=1") from None
        if self.preemption_mode == "swap" and not self.enable_prefix_caching:
            raise OptionError(
                "--preemption-mode",
                "swap",
                "finds swapped blocks by the prefix cache, which --no-enable-prefix-caching turns off",
                "Use recompute, or leave prefix caching on",
            )

    def without_effect(self) -> tuple[tuple[str, str], ...]:
        """Fields whose value changes nothing because another decides, each with the reason."""
        found: list[tuple[str, str]] = []
        if self.scheduling_policy != "fair":
            found.append(("tenant_weights", "only --scheduling-policy fair weighs tenants"))
        if self.scheduling_policy == "fcfs":
            found.append(("aging_time", "--scheduling-policy fcfs knows no priorities"))
        if self.flight_recorder_size == 0:
            found.append(("record_tokens", "--flight-recorder-size 0 records nothing"))
        return tuple(found)


def tenant_weights(text: str) -> Mapping[str, float]:
    """Weights by tenant from `name=weight,...`. Raises ValueError naming a bad part."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, separator, number = part.rpartition("=")
        try:
            weight = float(number)
        except ValueError:
            weight = 0.0
        if not separator or not 0 < weight < float("inf"):
            raise ValueError(f"{part!r} is not name=weight with a finite weight above 0")
        weights[name] = weight
    return weights
