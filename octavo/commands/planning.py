"""Options of `octavo plan` and `octavo replay`: a workload, a replica's description, a target. Knows no service."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.cost_model import CostModel, parse_costs
from octavo.options import Limits, OptionError, argument, check_values, option

_AT_LEAST_ONE = Limits(minimum=1)
_MEANINGS = {
    "prefill_tokens_per_s": "prompt tokens computed in a second",
    "step_ms": "a step without a token",
    "row_us": "one more decoding row",
    "kv_token_ns": "one more cached token of a decoding row",
    "copy_us": "one block between the tiers",
    "kv_bytes": "KV of one token",
}
_COSTS_HELP = (
    "What a step costs, as name=number,...; names, with meaning and default: "
    f"{', '.join(f'{name} ({what}; {getattr(CostModel(), name):g})' for name, what in _MEANINGS.items())}. "
    "`octavo ctl load` shows what a real replica takes."
)


def _check_costs(flag: str, text: str) -> None:
    try:
        parse_costs(text)
    except ValueError as error:
        raise OptionError(flag, text, str(error), "Use prefill_tokens_per_s=5000,step_ms=20") from None


@dataclass(frozen=True)
class PlanConfig:
    """What to expect of how many replicas: the workload, the replica, and what would be good enough."""

    trace: str | None = option(
        None,
        "File with one request a line as JSON: at_s, prompt_tokens, output_tokens, and if wanted tenant, priority, "
        "prefix, prefix_tokens.",
    )
    request_rate: float = option(1.0, "Requests a second, at random (Poisson).", limits=Limits(minimum=1e-6))
    num_requests: int = option(1000, "Requests of a made-up workload.", limits=Limits(1, 10**7))
    prompt_tokens: str = option(
        "512", "Prompt lengths: N, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEDIAN:SIGMA."
    )
    output_tokens: str = option("128", "Output lengths, spelled as prompt lengths are.")
    num_prefixes: int = option(
        0, "Prompts begin with one of so many shared prefixes; 0: all are distinct.", limits=Limits(0)
    )
    prefix_tokens: int = option(256, "Length of a shared prefix.", limits=_AT_LEAST_ONE)
    seed: int = option(0, "Seed of the made-up workload.")

    replicas: int | None = option(
        None, "Number of replicas; 1 when unset, or the least that meets the target.", limits=Limits(1, 1024)
    )
    costs: str = option("", _COSTS_HELP)
    max_model_len: int = option(8192, "Longest sequence.", limits=Limits(minimum=2))
    block_size: int = option(16, "Tokens in a KV block.", limits=Limits(1, 256))
    kv_cache_memory: int = option(
        16 * 2**30, "Size of a replica's KV cache.", kind="bytes", limits=Limits(minimum=2**16)
    )
    num_kv_blocks: int | None = option(
        None, "Number of KV blocks, in place of --kv-cache-memory.", limits=_AT_LEAST_ONE
    )
    swap_space: float = option(0.0, "Host memory for evicted KV blocks, in GiB.", limits=Limits(0, 2**20))
    max_num_seqs: int = option(64, "Most sequences that run at once on a replica.", limits=Limits(1, 4096))
    max_num_batched_tokens: int = option(512, "Most tokens computed in one step.", limits=Limits(1, 65536))

    target_ttft_ms: float | None = option(
        None, "Time to first token that 95 of 100 requests shall not exceed.", limits=Limits(minimum=0.001)
    )
    target_tpot_ms: float | None = option(
        None, "Time between two tokens that 95 of 100 requests shall not exceed.", limits=Limits(minimum=0.001)
    )
    max_replicas: int = option(64, "Most replicas to try for the target.", limits=Limits(1, 1024))

    def __post_init__(self) -> None:
        check_values(self)
        _check_costs("--costs", self.costs)


@dataclass(frozen=True)
class ReplayConfig:
    """A recording, and what would have been different."""

    file: str = argument("", "A recording, as `octavo ctl dump FILE` writes it.")
    costs: str | None = option(None, f"In place of what fits the recorded steps. {_COSTS_HELP}")

    def __post_init__(self) -> None:
        check_values(self)
        if self.costs is not None:
            _check_costs("--costs", self.costs)
