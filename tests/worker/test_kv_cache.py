"""Sizing and the account of memory, as arithmetic on numbers made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kernels.api import KV_PARTITION, BackendInfo
from octavo.machine import MachineFacts
from octavo.options import OptionError
from octavo.process import StartError
from tests.fakes.tiny_llama import TinyLlama, tiny_config
from worker_svc.config import WorkerConfig
from worker_svc.kv_cache import memory_table, model_shape, size_memory
from worker_svc.model.families import parse_config

GIB = 2**30
MACHINE = MachineFacts("Linux", "x86_64", 2, 16 * GIB, 8 * GIB, frozenset(), (3, 11, 0), None)
SHAPE = model_shape(parse_config(tiny_config(TinyLlama(max_positions=8192))), 8192)
BLOCK_BYTES = SHAPE.kv_block_bytes(16, "float32")
CONFIG = WorkerConfig()
KERNELS = BackendInfo("cpu", "avx2+panels", batch_invariant=True)


@pytest.mark.parametrize("block_size", [1, 4, 12, 16, 48, 128, 192, 256])
def test_block_sizes_are_those_that_attention_divides(block_size: int) -> None:
    if KV_PARTITION % block_size == 0:
        assert WorkerConfig(block_size=block_size).block_size == block_size
    else:
        with pytest.raises(OptionError, match=f"does not divide {KV_PARTITION}"):
            WorkerConfig(block_size=block_size)


def test_what_others_hold_is_what_is_missing() -> None:
    memory = size_memory(CONFIG, SHAPE, "float32", MACHINE, resident_bytes=GIB)
    assert memory.others_bytes == 7 * GIB
    assert memory.free_bytes == 8 * GIB - memory.workspace_bytes - memory.grammar_bytes - memory.pool.num_bytes


def test_what_grammars_will_take_is_kept_free() -> None:
    """They read the vocabulary when the cache has been sized."""
    wide = replace(SHAPE, vocab_size=SHAPE.vocab_size + 2**14)
    machine = replace(MACHINE, free_memory_bytes=2**29)
    narrow, less = (size_memory(CONFIG, shape, "float32", machine, 0) for shape in (SHAPE, wide))
    taken = less.grammar_bytes - narrow.grammar_bytes + less.workspace_bytes - narrow.workspace_bytes
    assert less.grammar_bytes - narrow.grammar_bytes == 2**24
    assert narrow.free_bytes + narrow.pool.num_bytes - less.free_bytes - less.pool.num_bytes == taken
    assert "the vocabulary once more" in memory_table(less, wide, "float32", CONFIG, KERNELS)
    # Every rank has all of it.
    assert SHAPE.part(0, 2).grammar_bytes == SHAPE.grammar_bytes


def test_what_second_copies_will_take_is_kept_free() -> None:
    machine = replace(MACHINE, free_memory_bytes=2**29)
    without, less = (size_memory(CONFIG, SHAPE, "float32", machine, 0, copies) for copies in (0, 3 * 2**20))
    assert without.free_bytes + without.pool.num_bytes - less.free_bytes - less.pool.num_bytes == 3 * 2**20
    assert "3.00 MiB  at most, of weights, for steps of few rows" in memory_table(
        less, SHAPE, "float32", CONFIG, KERNELS
    )
    assert "second copies" not in memory_table(without, SHAPE, "float32", CONFIG, KERNELS)


def test_the_first_option_given_decides() -> None:
    by_blocks = size_memory(replace(CONFIG, num_kv_blocks=7), SHAPE, "float32", MACHINE, 0).pool
    by_memory = size_memory(replace(CONFIG, kv_cache_memory=10 * BLOCK_BYTES + 1), SHAPE, "float32", MACHINE, 0).pool
    by_share = size_memory(CONFIG, SHAPE, "float32", replace(MACHINE, free_memory_bytes=2**25), 0).pool
    assert (by_blocks.num_blocks, by_memory.num_blocks) == (7, 10)
    assert 0 < by_share.num_bytes < 2**24


def test_a_machine_without_room_is_refused() -> None:
    with pytest.raises(StartError, match="no room for one block"):
        size_memory(CONFIG, SHAPE, "float32", replace(MACHINE, free_memory_bytes=2**20), 0)


def test_the_table_says_what_runs_at_once() -> None:
    memory = size_memory(replace(CONFIG, num_kv_blocks=256), SHAPE, "float32", MACHINE, 0)
    table = memory_table(memory, SHAPE, "float32", CONFIG, KERNELS)
    assert "256 blocks of 16 tokens, 4096 tokens: --num-kv-blocks" in table
    assert "sequences at once: 1 of 4096 tokens, 4 of 1024 tokens" in table
    assert "longest context that fits: 4096 of the model's 8192 tokens" in table
    assert "other processes" in table
    assert "at most 512 tokens (--max-num-batched-tokens, the default) of at most 64 sequences" in table


def test_the_table_says_all_of_the_context_where_it_fits() -> None:
    memory = size_memory(CONFIG, SHAPE, "bfloat16", MACHINE, 0)
    table = memory_table(memory, SHAPE, "bfloat16", CONFIG, replace(KERNELS, kept_weights="float16"))
    assert "M parameters in float16" in table
    assert "longest context that fits: 8192 tokens" in table


def test_the_table_counts_weights_as_the_kernels_keep_them() -> None:
    memory = replace(size_memory(CONFIG, SHAPE, "float32", MACHINE, 0), weight_bytes=9 * 2**20)
    kernels = replace(KERNELS, kept_weights="blocks of 4 bits", saved_bytes=7 * 2**20)
    _, first, *_ = memory_table(memory, SHAPE, "float32", CONFIG, kernels).splitlines()
    assert first.split()[:3] == ["weights", "2.00", "MiB"]
