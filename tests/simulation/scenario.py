"""What one seed means: sizes, limits, requests, and which misfortunes this world knows.

Pure: a scenario is drawn from a seed and nothing else. Each seed leaves most misfortunes out, so that those it has
meet undisturbed, and makes something scarce.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from octavo.internal.v1 import scheduler_pb2 as pb
from octavo.internal.v1 import types_pb2
from scheduler_svc.core.limits import CoreLimits, PreemptionMode, SchedulingPolicy
from scheduler_svc.core.types import ReplicaSpec
from tests.simulation.answers import Model
from tests.simulation.network import Weather
from tests.simulation.routers import Wanted, sampling_of

MODEL = "m"
VOCAB_SIZE = 40
END_TOKEN_ID = 0
POISON_TOKEN_ID = VOCAB_SIZE  # never sampled


class Misfortune(enum.Enum):
    """What may happen to the world."""

    CALL_BREAKS = "a Generate call breaks"
    WATCH_BREAKS = "a Watch breaks"
    ATTACH_BREAKS = "an Attach breaks"
    WORKER_DIES = "a worker dies and comes back"
    WORKER_LEAVES = "a worker leaves for good, another joins"
    ROUTER_DIES = "a router dies, another comes"
    SCHEDULER_DIES = "the scheduler dies and comes back"
    CLIENT_LEAVES = "a client goes away"
    CACHE_RESET = "an operator resets the prefix cache"
    DRAIN = "an operator drains a replica and lets it serve again"
    UPDATE = "an operator changes a request's priority"


@dataclass(frozen=True)
class Scenario:
    """One seed's world."""

    seed: int
    spec: ReplicaSpec
    model: Model
    limits: CoreLimits
    weather: Weather
    num_routers: int
    num_workers: int
    requests: tuple[Wanted, ...]
    """In the order of their arrival."""
    misfortunes: tuple[Misfortune, ...]
    mean_calm_s: float
    """Time between two misfortunes."""
    storm_s: float
    """Until then requests arrive and misfortunes happen; then all must come to an end."""
    forgetting: float
    """Probability that the flight recorder forgets its beginning within 50 ms."""
    refusal: float
    """Probability that a router does not take a step's tokens from a worker."""

    @property
    def may_fill_queue(self) -> bool:
        """Whether requests may be refused for want of room in the queue."""
        return self.limits.max_waiting < 1000


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(f"scenario {seed}")
    is_poisoned = rng.random() < 0.1
    spec = _draw_spec(rng, is_poisoned)
    modes = tuple(PreemptionMode)
    has_caching = rng.random() < 0.8
    limits = CoreLimits(
        max_waiting=rng.choice((5, 2048, 2048, 2048)),
        max_num_seqs=rng.choice((None, None, 1, 3)),
        max_num_batched_tokens=rng.choice((None, None, 4, 17)),
        enable_prefix_caching=has_caching,
        max_unanswered_plans=rng.choice((1, 2, 2, 2, 3)),
        progress_tokens=rng.choice((1, 4, 32)),
        max_overtakes=rng.choice((0, 2, 64)),
        policy=rng.choice(tuple(SchedulingPolicy)),
        preemption_mode=rng.choice(modes if has_caching else (PreemptionMode.AUTO, PreemptionMode.RECOMPUTE)),
        target_inter_token_ns=rng.choice((None, 20_000_000)),
        max_prefill_tokens=rng.choice((None, None, 5)),
        expected_output_tokens=rng.choice((0, 0, 8, 256)),
    )
    num_requests = rng.randint(8, 30)
    weather = Weather(
        longest_delay_s=rng.choice((0.001, 0.02, 0.2)),
        token_loss=rng.choice((0.0, 0.0, 0.01, 0.1)),
        token_repeats=rng.choice((0.0, 0.0, 0.1)),
        token_reordering=rng.choice((0.0, 0.0, 0.1)),
    )
    kinds = list(Misfortune)
    return Scenario(
        seed=seed,
        spec=spec,
        model=Model(VOCAB_SIZE, is_fickle=rng.random() < 0.3, longest_sequence=longest_output_end(spec)),
        limits=limits,
        weather=weather,
        num_routers=rng.randint(1, 3),
        num_workers=rng.randint(1, 3),
        requests=_draw_requests(rng, spec, num_requests, is_poisoned),
        misfortunes=tuple(rng.sample(kinds, rng.randint(0, 4))),
        mean_calm_s=rng.choice((0.02, 0.1, 0.5)),
        storm_s=rng.choice((0.5, 2.0, 5.0)),
        forgetting=rng.choice((0.0, 0.02, 0.2)),
        refusal=rng.choice((0.0, 0.0, 0.0, 0.02)),
    )


def _draw_spec(rng: random.Random, is_poisoned: bool) -> ReplicaSpec:
    block_size = rng.choice((1, 2, 4, 8))
    max_model_len = rng.choice((16, 40, 80))
    needed = -(-max_model_len // block_size)
    # From pools which one sequence outgrows to pools that hold a few.
    num_blocks = max(2, int(needed * rng.choice((0.6, 1.0, 1.5, 4.0))))
    return ReplicaSpec(
        replica_id=0,
        name="",
        incarnation=0,
        model=MODEL,
        fingerprint="weights",
        max_model_len=max_model_len,
        block_size=block_size,
        num_device_blocks=num_blocks,
        # From no host tier to one that holds all that was ever evicted.
        num_host_blocks=rng.choice((0, 2, num_blocks, 20 * num_blocks)),
        # Suspects of a crash are told apart only where they ran alone.
        num_slots=1 if is_poisoned else rng.choice((2, 4, 8)),
        max_step_tokens=rng.choice((8, 16, 64)),
    )


def _draw_requests(rng: random.Random, spec: ReplicaSpec, count: int, is_poisoned: bool) -> tuple[Wanted, ...]:
    beginnings = [[rng.randrange(1, VOCAB_SIZE) for _ in range(spec.max_model_len)] for _ in range(3)]
    requests: list[Wanted] = []
    while len(requests) < count:
        group_size = rng.choice((1, 1, 1, 3))
        poison = is_poisoned and not requests
        prompt = _draw_prompt(rng, spec, beginnings)
        if poison:
            prompt = [*prompt[: spec.max_model_len // 2], POISON_TOKEN_ID]
        for member in range(group_size):
            requests.append(_draw_request(rng, spec, prompt, len(requests) + 1, (group_size, member)))
            if poison:
                break
    return tuple(requests)


def _draw_prompt(rng: random.Random, spec: ReplicaSpec, beginnings: list[list[int]]) -> list[int]:
    longest = longest_prompt(spec)
    length = rng.randint(1, longest)
    if rng.random() < 0.03:
        length = longest + rng.randint(1, 3)
    shared = rng.choice(beginnings)[: rng.randint(0, length)]
    return shared + [rng.randrange(1, VOCAB_SIZE) for _ in range(length - len(shared))]


def longest_output_end(spec: ReplicaSpec) -> int:
    """Tokens at which any sequence ends: at the model's limit, or with one that the whole pool cannot hold."""
    return min(spec.max_model_len, spec.num_cache_tokens + 1)


def longest_prompt(spec: ReplicaSpec) -> int:
    """Tokens of the longest prompt that is not refused: it and one token fit."""
    return min(spec.max_model_len, spec.num_cache_tokens) - 1


def _draw_request(
    rng: random.Random, spec: ReplicaSpec, prompt: list[int], stream_key: int, group: tuple[int, int]
) -> Wanted:
    group_size, member = group
    max_tokens = rng.choice((1, 2, rng.randint(1, 30), 1000))
    end_ids = [END_TOKEN_ID] if rng.random() < 0.7 else []
    stop_ids = rng.choice(([], [3], [3, 4]))
    sampling = sampling_of(max_tokens, end_ids, stop_ids)
    positions = range(1, len(prompt)) if member == 0 and rng.random() < 0.2 and len(prompt) > 1 else None
    if positions is not None:
        sampling.num_prompt_logprobs = 0
    call = pb.GenerateRequest(
        request_id=f"request-{stream_key}",
        model=MODEL,
        task=types_pb2.TASK_GENERATE,
        prompt_token_ids=prompt,
        sampling=sampling,
        tenant=rng.choice(("", "", "a")),
        cache_salt=rng.choice(("", "", "s")),
        priority=rng.choice((0, 0, 0, -1, 2)),
        group_id=f"group-{stream_key - member}" if group_size > 1 else "",
        group_size=group_size,
        stream_key=stream_key,
        queue_events=rng.random() < 0.3,
    )
    return Wanted(
        stream_key=stream_key,
        call=call,
        cancel_at_tokens=rng.randint(0, 20) if rng.random() < 0.1 else None,
        prompt_logprob_positions=positions,
        is_poison=POISON_TOKEN_ID in prompt,
        fails_numerically=rng.random() < 0.03,
        is_too_long=len(prompt) > longest_prompt(spec),
    )
