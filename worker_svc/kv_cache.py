"""The size of the KV cache, and the table that accounts for the worker's memory at start.

The arithmetic is octavo.memory's, by which the checks predict before anything is loaded. Knows numbers and allocates
nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.api import BackendInfo
from octavo.machine import MachineFacts
from octavo.memory import KvPool, KvRequest, ModelShape, size_kv_pool
from octavo.process import StartError
from octavo.sizes import format_bytes
from worker_svc.config import WorkerConfig
from worker_svc.device.memory import CardMemory
from worker_svc.model.config import ModelConfig
from worker_svc.model.names import layer_vector_items

# A card's memory divided by this stays free where the KV cache would take all that others leave: fragments between
# tensors, and what libraries load once they need it.
_UNSEEN_DIVISOR = 50


def model_shape(model: ModelConfig, max_model_len: int) -> ModelShape:
    """The numbers of the model that decide its memory."""
    return ModelShape(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        vocab_size=model.num_embedding_rows,
        max_model_len=max_model_len,
        tied_embeddings=model.tied_embeddings,
        layer_vector_items=layer_vector_items(model),
        rope_position_items=sum(rope.rotary_dim for rope in model.ropes),
    )


def resolve_max_model_len(config: WorkerConfig, model: ModelConfig) -> int:
    """The longest sequence. Raises StartError for one beyond the positions that the model was made for."""
    if config.max_model_len is None:
        return model.max_positions
    if config.max_model_len > model.max_positions:
        raise StartError(
            f"--max-model-len {config.max_model_len} is more than the model's {model.max_positions} positions "
            f"(max_position_embeddings); use at most {model.max_positions}"
        )
    return config.max_model_len


@dataclass(frozen=True)
class WorkerMemory:
    """Where a worker's memory goes, in bytes."""

    weight_bytes: int
    workspace_bytes: int
    pool: KvPool
    # Held by others on this machine, as far as the worker can see.
    others_bytes: int
    # Left once the cache is full and a step runs.
    free_bytes: int
    # Kept by CUDA graphs.
    graph_bytes: int = 0
    # Of main memory, taken when the cache is sized already.
    grammar_bytes: int = 0
    copy_bytes: int = 0

    def with_blocks(self, num_blocks: int, reason: str) -> WorkerMemory:
        """With a smaller pool, and why."""
        pool = replace(self.pool, num_blocks=num_blocks, reason=reason)
        return replace(self, pool=pool, free_bytes=self.free_bytes + self.pool.num_bytes - pool.num_bytes)


def size_memory(
    config: WorkerConfig,
    shape: ModelShape,
    dtype: str,
    machine: MachineFacts,
    resident_bytes: int,
    copy_bytes: int = 0,
) -> WorkerMemory:
    """Sizes the KV cache of a rank whose weights are loaded: `machine` was read after that, and is its share of it.

    `copy_bytes` are still to be taken, by second copies of weights. Raises StartError when not one block fits, naming
    what is free and what a block takes.
    """
    workspace = shape.workspace_bytes(config.max_num_seqs, config.max_num_batched_tokens, dtype)
    request = KvRequest(
        block_size=config.block_size,
        max_model_len=shape.max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_kv_blocks=config.num_kv_blocks,
        kv_cache_memory=config.kv_cache_memory,
        kv_memory_fraction=config.kv_memory_fraction,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    free = machine.free_memory_bytes - workspace - config.swap_bytes - shape.grammar_bytes - copy_bytes
    pool = size_kv_pool(request, shape.kv_block_bytes(config.block_size, request.kv_dtype(dtype)), free)
    if pool.num_blocks < 1:
        raise StartError(
            f"the KV cache has no room for one block of {format_bytes(pool.block_bytes)} ({pool.reason}; "
            f"{format_bytes(max(0, free))} free after weights and workspace); "
            "raise --kv-cache-memory, lower --max-num-seqs or --max-num-batched-tokens, or free memory"
        )
    if pool.num_bytes > free:
        raise StartError(
            f"the KV cache of {format_bytes(pool.num_bytes)} ({pool.num_blocks} blocks, {pool.reason}) does not fit in "
            f"the {format_bytes(max(0, free))} free after weights and workspace; lower it, or free memory"
        )
    return WorkerMemory(
        weight_bytes=shape.weight_bytes(dtype) + shape.rope_bytes(shape.max_model_len),
        workspace_bytes=workspace,
        pool=pool,
        others_bytes=max(0, machine.total_memory_bytes - machine.free_memory_bytes - resident_bytes),
        free_bytes=free - pool.num_bytes,
        grammar_bytes=shape.grammar_bytes,
        copy_bytes=copy_bytes,
    )


def size_card_memory(
    config: WorkerConfig, block_bytes: int, card: CardMemory, workspace_bytes: int, graph_bytes: int
) -> WorkerMemory:
    """Sizes the KV cache of a rank on a GPU: `card` was read with the weights loaded, the rest was measured.

    The cache takes what is left of --gpu-memory-utilization of the card, as far as other processes leave it free, but
    for a little that no measurement sees. Raises StartError when it does not fit, naming the option to change and to
    what.
    """
    share = config.gpu_memory_utilization
    own_room = int(card.total_bytes * share) - card.own_bytes - workspace_bytes - graph_bytes
    free_room = card.free_bytes - workspace_bytes - graph_bytes
    left_room = free_room - card.total_bytes // _UNSEEN_DIVISOR
    room = max(0, min(own_room, left_room))
    if config.num_kv_blocks is not None:
        num_blocks, reason, room = config.num_kv_blocks, "--num-kv-blocks", max(0, free_room)
    elif config.kv_cache_memory is not None:
        num_blocks, reason, room = config.kv_cache_memory // block_bytes, "--kv-cache-memory", max(0, free_room)
    elif own_room <= left_room:
        num_blocks, reason = room // block_bytes, f"what --gpu-memory-utilization {share:g} leaves"
    else:
        num_blocks, reason = room // block_bytes, "what other processes leave free"
    pool = KvPool(num_blocks, config.block_size, block_bytes, reason)
    if num_blocks < 1 or pool.num_bytes > room:
        held = (
            f"the card's {format_bytes(card.total_bytes)} hold weights {format_bytes(card.own_bytes)}, a step "
            f"{format_bytes(workspace_bytes)}, graphs {format_bytes(graph_bytes)}, other processes "
            f"{format_bytes(card.others_bytes)}"
        )
        remedy = _card_remedy(pool, card, room, own_room < left_room, graph_bytes)
        raise StartError(
            f"the KV cache has {format_bytes(room)}, {num_blocks} blocks ({reason}) take "
            f"{format_bytes(max(1, num_blocks) * block_bytes)}: {held}; {remedy}"
        )
    return WorkerMemory(
        weight_bytes=card.own_bytes,
        workspace_bytes=workspace_bytes,
        pool=pool,
        others_bytes=card.others_bytes,
        free_bytes=free_room - pool.num_bytes,
        graph_bytes=graph_bytes,
    )


def _card_remedy(pool: KvPool, card: CardMemory, room: int, is_share_short: bool, graph_bytes: int) -> str:
    """The option to change, and to what."""
    if pool.reason == "--num-kv-blocks" and room >= pool.block_bytes:
        return f"use --num-kv-blocks {room // pool.block_bytes} or less"
    if pool.reason == "--kv-cache-memory" and room >= pool.block_bytes:
        return f"use --kv-cache-memory {room // 2**20}MiB or less"
    smaller = "lower --max-num-batched-tokens or --max-num-seqs" + (", give --enforce-eager" if graph_bytes else "")
    if is_share_short:
        # As much as is free now, rounded down.
        unseen_bytes = card.total_bytes // _UNSEEN_DIVISOR
        most = int(100 * (card.own_bytes + card.free_bytes - unseen_bytes) / card.total_bytes) / 100
        return f"use --gpu-memory-utilization {min(most, 0.99):g}, or {smaller}"
    return f"free memory of the card, {smaller}, or divide the model with --tensor-parallel-size"


def memory_table(
    memory: WorkerMemory, shape: ModelShape, dtype: str, config: WorkerConfig, kernels: BackendInfo
) -> str:
    """The account of memory that the log shows at start, one line a purpose, and what it allows."""
    pool = memory.pool
    longest = min(shape.max_model_len, pool.num_tokens)
    millions = f"{shape.num_parameters / 1e6:.0f} M parameters"
    gain = ""
    if config.kv_cache_dtype != "auto":
        wide = pool.num_bytes // shape.kv_block_bytes(pool.block_size, dtype) * pool.block_size
        gain = f"; in {config.kv_cache_dtype}, {pool.num_tokens - wide} tokens more than in {dtype}"
    rows = [
        ("weights", memory.weight_bytes - kernels.saved_bytes, f"{millions} in {kernels.kept_weights or dtype}"),
        (
            "KV cache",
            pool.num_bytes,
            f"{pool.num_blocks} blocks of {pool.block_size} tokens, {pool.num_tokens} tokens: {pool.reason}{gain}",
        ),
        ("workspace", memory.workspace_bytes, "one step's activations and logits at most"),
        *([("CUDA graphs", memory.graph_bytes, "of decode steps, measured")] if memory.graph_bytes else []),
        *([("grammars", memory.grammar_bytes, "the vocabulary once more")] if memory.grammar_bytes else []),
        *(
            [("second copies", memory.copy_bytes, "at most, of weights, for steps of few rows")]
            if memory.copy_bytes
            else []
        ),
        ("other processes", memory.others_bytes, ""),
        ("left free", memory.free_bytes, ""),
    ]
    lines = [f"{name:<16}{format_bytes(num_bytes):>11}  {note}".rstrip() for name, num_bytes, note in rows]
    at_once = (
        f"{_concurrency(pool, context, config.max_num_seqs)} of {context} tokens"
        for context in sorted({longest, min(longest, 1024)}, reverse=True)
    )
    lines.append(f"sequences at once: {', '.join(at_once)}")
    if longest < shape.max_model_len:
        lines.append(f"longest context that fits: {longest} of the model's {shape.max_model_len} tokens")
    else:
        lines.append(f"longest context that fits: {longest} tokens, all that --max-model-len allows")
    lines.append(
        f"a step: at most {config.max_num_batched_tokens} tokens (--max-num-batched-tokens, "
        f"{_origin(config, 'max_num_batched_tokens')}) of at most {config.max_num_seqs} sequences (--max-num-seqs, "
        f"{_origin(config, 'max_num_seqs')})"
    )
    whose = "memory" if shape.num_ranks == 1 else f"memory of this rank, one of {shape.num_ranks}"
    return f"{whose}\n" + "\n".join(lines)


def _origin(config: WorkerConfig, name: str) -> str:
    return "the default" if getattr(config, name) == getattr(WorkerConfig, name) else "as given"


def _concurrency(pool: KvPool, context_tokens: int, max_num_seqs: int) -> str:
    blocks_each = -(-context_tokens // pool.block_size)
    fitting = pool.num_blocks // blocks_each
    return f"{fitting}" if fitting <= max_num_seqs else f"{max_num_seqs} (--max-num-seqs)"


def resident_bytes() -> int:
    """Memory that this process holds now, where the system says so; else 0."""
    statistics = Path("/proc/self/statm")
    if not statistics.exists():
        return 0
    return int(statistics.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
