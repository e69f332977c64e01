"""Microseconds to sample one step's rows, as most requests ask and with truncation. Knows the kernel API."""

from __future__ import annotations

import torch

from benchmarks.gpu import aims
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.kernel_cases import moved
from kernels.api import SamplingBatch

ROWS = 64


def sampling_table(bench: Bench) -> None:
    """Of bf16 logits over the model's vocabulary."""
    vocab = int(bench.sizes.model["vocab_size"])
    kinds = (("greedy", 0.0, 0, 1.0), ("Gumbel-max", 1.0, 0, 1.0), ("top-k 50, top-p 0.9", 1.0, 50, 0.9))
    logits = (4 * torch.randn(ROWS, vocab, device=bench.place)).bfloat16()
    for name, temperature, top_k, top_p in kinds:
        what = f"sampling {ROWS} rows of {vocab}, {name}"
        if not bench.has_time(2.0, what):
            return
        batch = moved(plain_batch(vocab, temperature, top_k, top_p), bench.place)
        us = bench.time_us([lambda batch=batch: bench.backend.sample(logits, batch)])  # type: ignore[misc]
        aim = aims.beside(aims.SAMPLING_US[name], "us")
        bench.note("sampling", f"{what:<48} {us:9.1f} us{aim}", rows=ROWS, vocab=vocab, how=name, us=us)


def plain_batch(vocab: int, temperature: float, top_k: int, top_p: float) -> SamplingBatch:
    """Rows of different seeds that ask for nothing else."""
    starts, no_ids = torch.zeros(ROWS + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    return SamplingBatch(
        temperatures=torch.full((ROWS,), temperature),
        top_ks=torch.full((ROWS,), top_k, dtype=torch.int32),
        top_ps=torch.full((ROWS,), top_p),
        min_ps=torch.zeros(ROWS),
        seeds=torch.arange(ROWS),
        positions=torch.arange(ROWS) + 100,
        repetition_penalties=torch.ones(ROWS),
        frequency_penalties=torch.zeros(ROWS),
        presence_penalties=torch.zeros(ROWS),
        history_starts=starts,
        history_ids=no_ids,
        history_prompt_lens=torch.zeros(ROWS, dtype=torch.int32),
        bias_starts=starts,
        bias_ids=no_ids,
        bias_values=torch.zeros(0),
        forbidden_starts=starts,
        forbidden_ids=no_ids,
        logprob_rows=no_ids,
        num_top=0,
        vocab_size=vocab,
    )
