"""What sampling takes and gives, and the uniform numbers by which it draws.

Part of `kernels.api`, which is where they are imported from. Knows rows of logits; no sequences and no requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingBatch:
    """How the next token of each of B rows is chosen. Tensors on the backend's device.

    Ragged lists are (starts [B + 1] int32, values): row r owns values[starts[r]:starts[r + 1]].

    Order of application (the logits are taken in fp32): logit bias; repetition, frequency, presence penalty; forbidden
    ids; temperature; top-k; top-p; min-p. Only ids below `vocab_size` take part. Everywhere ties go to the lowest id:
    "likelier" orders by (logit descending, id ascending). top-p keeps the shortest prefix of that order, after top-k
    and renormalised over what top-k kept, whose probability reaches top_p. min-p keeps tokens whose probability is at
    least min_p times the likeliest's. The likeliest token is always kept.

    Choice: temperature 0 takes the likeliest token; otherwise the kept token with the highest logit / T + Gumbel(u)
    (Gumbel-max, equal to sampling from the softmax), with u = `uniforms(seed, position, id)`.
    """

    temperatures: Tensor  # [B] fp32
    top_ks: Tensor  # [B] int32, 0 is off
    top_ps: Tensor  # [B] fp32, 1 is off
    min_ps: Tensor  # [B] fp32, 0 is off
    seeds: Tensor  # [B] int64, the bits of the unsigned seed
    positions: Tensor  # [B] int64: position in the sequence of the token to be chosen
    repetition_penalties: Tensor  # [B] fp32, 1 is off
    frequency_penalties: Tensor  # [B] fp32, 0 is off
    presence_penalties: Tensor  # [B] fp32, 0 is off
    # Prompt ids, then output ids, of rows that have a penalty; empty for the others. Values int32.
    history_starts: Tensor
    history_ids: Tensor
    # [B] int32: how many of the row's history ids are the prompt's.
    history_prompt_lens: Tensor
    # Logit bias: ids int32, values fp32.
    bias_starts: Tensor
    bias_ids: Tensor
    bias_values: Tensor
    # Ids that may not be chosen. Values int32.
    forbidden_starts: Tensor
    forbidden_ids: Tensor
    # [L] int32, ascending: the rows whose logprobs are wanted.
    logprob_rows: Tensor
    # Alternatives to report for each of those rows: the largest number any of them asked for.
    num_top: int
    # The real vocabulary; logits at or above it are padding.
    vocab_size: int


@dataclass(frozen=True)
class Logprobs:
    """Natural logs of the softmax of the raw fp32 logits over the real vocabulary, for L rows."""

    token_logprobs: Tensor  # [L] fp32: of the given or chosen token
    top_ids: Tensor  # [L, num_top] int32: likeliest first, ties by lowest id
    top_logprobs: Tensor  # [L, num_top] fp32


@dataclass(frozen=True)
class Samples:
    """The chosen tokens of B rows."""

    token_ids: Tensor  # [B] int64
    # [B] bool: false where the row's raw logits below vocab_size held NaN or infinity; its token id is meaningless.
    finite: Tensor
    # Of `logprob_rows`, in their order; None when there are none.
    logprobs: Logprobs | None


def uniforms(seed: int, position: int, token_ids: Tensor) -> Tensor:
    """The uniform numbers of Gumbel-max sampling: fp32 in (0, 1), one per id of an int64 tensor.

    A counter-based hash, so that a token's number depends on nothing but the request's seed, the position and the id:
    two rounds of the 32-bit finalizer `lowbias32` (C. Wellons, "Prospecting for Hash Functions", 2018) keyed by the
    halves of a splitmix64 (S. Vigna) of seed and position. 23 bits plus a half, so 0 and 1 cannot occur in fp32. Every
    backend computes exactly these numbers; this is the definition and the oracle.
    """
    key = splitmix64((seed + 0x9E3779B97F4A7C15 * (position + 1)) & 0xFFFFFFFFFFFFFFFF)
    x = _lowbias32(token_ids.to(torch.int64) ^ (key & 0xFFFFFFFF))
    x = _lowbias32(x ^ (key >> 32))
    return ((x >> 9).to(torch.float64).add_(0.5).mul_(2.0**-23)).to(torch.float32)


def splitmix64(x: int) -> int:
    """The output function of splitmix64 on a 64-bit unsigned integer."""
    mask = 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def _lowbias32(x: Tensor) -> Tensor:
    """lowbias32 on uint32 values held in int64, whose products of 32-bit factors wrap harmlessly above bit 32."""
    mask = 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & mask
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & mask
    return x ^ (x >> 16)
