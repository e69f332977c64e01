"""The workloads of a comparison, as arguments of vLLM's benchmark client, and what Octavo aims at in each.

Pure data: it starts nothing. Prompts are random tokens. Each workload has a seed of its own, so that no server answers
one workload's prompts from the cache of another's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """So many requests of one shape, so many of them at once. Every answer has exactly `num_output_tokens`."""

    name: str
    title: str
    num_input_tokens: int
    num_output_tokens: int
    num_requests: int
    num_at_once: int
    seed: int
    num_shared_tokens: int = 0
    """Tokens that all prompts begin with, on top of `num_input_tokens`."""
    throughput_aim: float | None = None
    """Least output tokens per second, the better peer's being 1."""
    ttft_aim: float | None = None
    """Most mean time to first token, the better peer's being 1."""

    def arguments(self, scale: float) -> list[str]:
        """The client's arguments; `scale` shortens a trial, and never below what runs at once."""
        num_requests = max(min(self.num_at_once, self.num_requests), round(self.num_requests * scale))
        return [
            *("--dataset-name", "random", "--seed", str(self.seed)),
            *("--random-prefix-len", str(self.num_shared_tokens)),
            *("--random-input-len", str(self.num_input_tokens)),
            *("--random-output-len", str(self.num_output_tokens)),
            *("--num-prompts", str(num_requests), "--max-concurrency", str(self.num_at_once)),
            *("--ignore-eos", "--temperature", "0"),
        ]


_ALL = (
    Workload("c1", "128 in, 128 out, 1 at once", 128, 128, 8, 1, seed=11, throughput_aim=1.15),
    Workload("c8", "128 in, 128 out, 8 at once", 128, 128, 32, 8, seed=12, throughput_aim=1.6),
    Workload("c32", "128 in, 128 out, 32 at once", 128, 128, 128, 32, seed=13, throughput_aim=1.8, ttft_aim=0.7),
    Workload(
        "prefix",
        "512 shared + 64 in, 32 out, 8 at once",
        64,
        32,
        32,
        8,
        seed=14,
        num_shared_tokens=512,
        throughput_aim=1.5,
    ),
    Workload("prefill", "1024 in, 16 out, 4 at once", 1024, 16, 16, 4, seed=15, throughput_aim=1.5),
    Workload("burst", "64 in, 64 out, 64 at once", 64, 64, 64, 64, seed=16),
)
WORKLOADS = {each.name: each for each in _ALL}
