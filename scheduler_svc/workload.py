"""Workloads of `octavo.workload` as arrivals at the core: token ids of no meaning, equal where prompts are to be."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from octavo.workload import Entry
from scheduler_svc.core.types import Request
from scheduler_svc.simulation import Arrival

MODEL = "model"


def arrivals(entries: Iterable[Entry], max_model_len: int) -> list[Arrival]:
    """The requests as sequences 1, 2, ...; lengths are cut to what a sequence may hold."""
    return [_arrival(entry, number, max_model_len) for number, entry in enumerate(entries, 1)]


def _arrival(entry: Entry, number: int, max_model_len: int) -> Arrival:
    num_prompt = min(entry.prompt_tokens, max_model_len - 1)
    num_output = min(entry.output_tokens, max_model_len - num_prompt)
    num_shared = min(entry.prefix_tokens, num_prompt)
    # Equal exactly where they are to be: at the beginning of prompts of one prefix.
    common = Random(f"prefix {entry.prefix}")
    own = Random(f"own {number}")
    prompt = [common.getrandbits(32) for _ in range(num_shared)]
    prompt += [own.getrandbits(32) for _ in range(num_prompt - num_shared)]
    request = Request(
        sequence_id=number,
        model=MODEL,
        prompt_token_ids=prompt,
        max_tokens=num_output,
        tenant=entry.tenant,
        priority=entry.priority,
    )
    return Arrival(int(entry.at_s * 1e9), request, num_output)
