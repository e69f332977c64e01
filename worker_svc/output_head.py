"""From hidden states to choices: the only place where logits of the whole vocabulary exist, and only on rank 0.

Each rank computes the logits of its part of the vocabulary. Rank 0 gathers them, samples, and tells the others what
their rows must know: the ids and whether the numbers were finite. Knows the decoder, the kernel API and the group.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.api import Backend, Logprobs, Samples, SamplingBatch
from worker_svc.model.decoder import Decoder
from worker_svc.parallel.group import TPGroup


class OutputHead:
    """Every rank calls the same methods in the same order."""

    def __init__(self, decoder: Decoder, backend: Backend, group: TPGroup) -> None:
        self._decoder = decoder
        self._backend = backend
        self._group = group

    def sample(self, hidden: Tensor, batch: SamplingBatch) -> Samples:
        """One token for each row of [B, hidden_size], B at least 1. Logprobs are rank 0's to report; None elsewhere."""
        logits = self._group.gather_columns(self._decoder.logits(hidden))
        if logits is None:
            told = self._group.broadcast(torch.empty(2, len(hidden), dtype=torch.int64, device=hidden.device))
            return Samples(told[0], told[1].bool(), None)
        samples = self._backend.sample(logits, batch)
        self._group.broadcast(torch.stack((samples.token_ids, samples.finite.long())))
        return samples

    def logprobs(self, hidden: Tensor, token_ids: Tensor, num_top: int, vocab_size: int) -> Logprobs:
        """Logprobs of given tokens [L] under the rows of [L, hidden_size]. The alternatives are rank 0's alone."""
        logits = self._group.gather_columns(self._decoder.logits(hidden))
        if logits is None:
            own = self._group.broadcast(torch.empty(len(hidden), dtype=torch.float32, device=hidden.device))
            return Logprobs(own, token_ids.new_empty(len(hidden), 0, dtype=torch.int32), own.new_empty(len(hidden), 0))
        found = self._backend.logprobs(logits, token_ids, num_top, vocab_size)
        self._group.broadcast(found.token_logprobs)
        return found
