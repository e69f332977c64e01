"""The scheduler's options, each with its default and a sentence; limits of replicas come from the workers."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.options import LOG_LEVELS, Limits, check_values, option

_AT_LEAST_ONE = Limits(minimum=1)


@dataclass(frozen=True)
class SchedulerConfig:
    """One scheduler process: where it listens and how it fills a step."""

    host: str = option("127.0.0.1", "Address the scheduler listens on, for routers and workers.")
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
    max_waiting_requests: int = option(
        2048, "Requests that may wait; one more is refused with a delay to retry after.", limits=_AT_LEAST_ONE
    )
    max_waiting_tokens: int = option(
        4_000_000,
        "Prompt tokens that waiting requests may hold together; beyond it requests are refused.",
        limits=_AT_LEAST_ONE,
    )
    token_networks: str = option(
        "",
        "Networks (CIDR, comma-separated) beside a router's own address that it may name for its tokens.",
    )
    check_laws: bool = option(False, "Check every law of the scheduler after each transition (slow).")
    log_level: str = option("info", "Least serious messages that are logged.", choices=LOG_LEVELS)

    def __post_init__(self) -> None:
        check_values(self)
