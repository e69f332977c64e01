"""Checks of memory: what the worker will hold against what is free. Pure functions over facts."""

from __future__ import annotations

from octavo.checks.types import Check, Facts, Finding, Severity
from octavo.sizes import format_bytes


def memory_fits(facts: Facts) -> Finding | None:
    if facts.model is None or facts.model.memory is None or (facts.cards is not None and facts.cards.on_gpu):
        return None
    need, free = facts.model.memory, facts.machine.free_memory_bytes
    others = facts.machine.total_memory_bytes - free
    measured = (
        f"{format_bytes(need.total_bytes)} needed: weights {format_bytes(need.weight_bytes)}, "
        f"KV cache {format_bytes(need.kv_bytes)}, workspace {format_bytes(need.workspace_bytes)}, "
        f"runtime {format_bytes(need.runtime_bytes)}"
    )
    if need.host_bytes:
        measured += f", host tier {format_bytes(need.host_bytes)} (--swap-space)"
    limit = f"{format_bytes(free)} free, {format_bytes(others)} held by other processes"
    if facts.model.other_models_bytes:
        limit += f", {format_bytes(facts.model.other_models_bytes)} wanted by the stack's other models"
        free -= facts.model.other_models_bytes
    if facts.model.num_ranks > 1:
        measured += f", for {facts.model.num_local_ranks} ranks together"
    num, total = facts.model.num_replicas, facts.model.num_replicas * need.total_bytes
    if num > 1:
        measured = f"{format_bytes(total)} needed by {num} replicas (--data-parallel-size), each {measured}"
    if total <= free:
        return Finding("memory", Severity.OK, measured, limit)
    without_kv = total - num * need.kv_bytes
    if without_kv < free:
        each = (free - without_kv) // num // facts.model.num_local_ranks
        remedy = f"Use --kv-cache-memory {each // 2**20}MiB or less, or free memory"
    elif num > 1 and need.total_bytes <= free:
        remedy = f"Use --data-parallel-size {free // need.total_bytes}, or free memory"
    else:
        remedy = f"Free {format_bytes(without_kv - free)} or more, or serve a smaller model"
    return Finding("memory", Severity.FAILURE, measured, limit, remedy)


def kv_holds_context(facts: Facts) -> Finding | None:
    model = facts.model
    if model is None or model.kv_pool is None or model.max_model_len_tokens is None:
        return None
    if facts.cards is not None and facts.cards.on_gpu:
        return None  # what is left of a card is measured by the worker
    pool, context = model.kv_pool, model.max_model_len_tokens
    measured = f"{pool.num_blocks} KV blocks of {pool.block_size}: {pool.num_tokens} tokens ({pool.reason})"
    limit = f"{context} tokens, one sequence of --max-model-len"
    if pool.num_tokens >= context:
        return Finding("kv-cache", Severity.OK, measured, limit)
    blocks = -(-context // pool.block_size)
    grow = f"--kv-cache-memory {-(-blocks * pool.block_bytes // 2**20)}MiB"
    if pool.num_blocks == 0:
        return Finding("kv-cache", Severity.FAILURE, measured, limit, f"Free memory, or give {grow}")
    return Finding(
        "kv-cache",
        Severity.WARNING,
        measured,
        limit,
        f"Longer sequences end early. Give {grow}, or --max-model-len {pool.num_tokens}",
    )


CHECKS = (
    Check(
        "memory",
        "The model and its KV cache fit into free memory",
        "The prediction is weights + KV cache + workspace + runtime. Make the KV cache smaller with "
        "`--kv-cache-memory` or `--num-kv-blocks`, close other programs, raise the container's memory limit, or "
        "serve a smaller model.",
        memory_fits,
        processes=("worker",),
    ),
    Check(
        "kv-cache",
        "The KV cache holds one sequence of --max-model-len",
        "A sequence that outgrows the whole KV cache ends with finish reason `length`. Give the cache more room "
        "with `--kv-cache-memory`, or lower `--max-model-len` so that clients are told the true limit.",
        kv_holds_context,
        processes=("worker",),
    ),
)
