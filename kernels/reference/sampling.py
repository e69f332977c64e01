"""Sampling and logprobs, row by row, as `SamplingBatch` documents them.

Knows logits and parameters; knows no sequences. Everything a row's choice rests on is computed per row, from correctly
rounded operations (see `elementary`), so that neither the batch nor the threads can change it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.api import Logprobs, Samples, SamplingBatch, uniforms
from kernels.contracts import check_num_top
from kernels.reference.elementary import exp, log, sum_last_

# Gumbel(u) lies within -2.82 and 16.64 for every u that `uniforms` can give: a token this far below the likeliest
# cannot win against it.
_GUMBEL_RANGE = 20.0
# Bounds the scratch memory of prompt logprobs.
_LOGPROB_ROWS_AT_ONCE = 64


def sample(logits: Tensor, batch: SamplingBatch) -> Samples:
    """One token per row of [B, padded_vocab]."""
    raw = logits[:, : batch.vocab_size].float()
    finite = torch.isfinite(raw).all(dim=-1)
    scores = raw.masked_fill(~finite[:, None], 0.0)
    _adjust(scores, batch)
    token_ids = scores.argmax(dim=-1)
    for row in (batch.temperatures > 0).nonzero().flatten().tolist():
        token_ids[row] = _choose(scores[row], batch, row)
    logprob_rows = batch.logprob_rows.to(torch.int64)
    chosen = None
    if len(logprob_rows):
        chosen = logprobs(logits[logprob_rows], token_ids[logprob_rows], batch.num_top, batch.vocab_size)
    return Samples(token_ids, finite, chosen)


def _adjust(scores: Tensor, batch: SamplingBatch) -> None:
    """Applies bias, penalties and forbidden ids in place."""
    bias_rows = _owners(batch.bias_starts)
    scores.index_put_((bias_rows, batch.bias_ids.to(torch.int64)), batch.bias_values, accumulate=True)
    history_lens = batch.history_starts[1:] - batch.history_starts[:-1]
    for row in history_lens.nonzero().flatten().tolist():
        _penalise(scores[row], batch, row)
    scores[_owners(batch.forbidden_starts), batch.forbidden_ids.to(torch.int64)] = -torch.inf


def _owners(starts: Tensor) -> Tensor:
    """The row of each value of a ragged list."""
    counts = (starts[1:] - starts[:-1]).to(torch.int64)
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


def _penalise(scores: Tensor, batch: SamplingBatch, row: int) -> None:
    """Repetition over prompt and output, then frequency and presence over the output, in place."""
    begin, end = batch.history_starts[row : row + 2].tolist()
    history = batch.history_ids[begin:end].to(torch.int64)
    output = history[int(batch.history_prompt_lens[row]) :]
    repetition = batch.repetition_penalties[row]
    seen = torch.bincount(history).nonzero().flatten()
    values = scores[seen]
    scores[seen] = torch.where(values > 0, values / repetition, values * repetition)
    counts = torch.bincount(output)
    generated = counts.nonzero().flatten()
    penalty = counts[generated].float() * batch.frequency_penalties[row]
    scores[generated] = scores[generated] - penalty - batch.presence_penalties[row]


def _choose(scores: Tensor, batch: SamplingBatch, row: int) -> int:
    """Gumbel-max over the tokens that top-k, top-p and min-p keep."""
    scaled = scores.double() / batch.temperatures[row].double()
    highest = scaled.max()
    if not highest.isfinite():  # every id is forbidden, or a penalty overflowed
        return int(scores.argmax())
    kept = scaled >= highest - _GUMBEL_RANGE
    kept &= _within_top(scores, scaled, batch, row)
    min_p = batch.min_ps[row].double()
    ids = kept.nonzero().flatten()
    if min_p > 0:
        ids = ids[exp(scaled[ids] - highest) >= min_p]
    noise = uniforms(int(batch.seeds[row]), int(batch.positions[row]), ids).double()
    gumbel = -log(-log(noise))
    return int(ids[(scaled[ids] + gumbel).argmax()])


def _within_top(scores: Tensor, scaled: Tensor, batch: SamplingBatch, row: int) -> Tensor:
    """Which tokens top-k and then top-p keep."""
    kept = torch.ones_like(scores, dtype=torch.bool)
    top_k, top_p = int(batch.top_ks[row]), batch.top_ps[row].double()
    if top_k <= 0 and top_p >= 1:
        return kept
    order = scores.sort(descending=True, stable=True).indices
    if top_k > 0:
        order = order[:top_k]
    if top_p < 1:
        odds = exp(scaled[order] - scaled[order[0]])
        reached = odds.cumsum(0)
        # A token is kept while what precedes it falls short; the likeliest always is: nothing precedes it.
        order = order[: 1 + int((reached[:-1] < top_p * reached[-1]).sum())]
    return kept.zero_().index_fill_(0, order, True)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int, vocab_size: int) -> Logprobs:
    """Logprobs of given tokens and the `num_top` likeliest; raises ValueError when that is more than the vocabulary."""
    check_num_top(num_top, vocab_size)
    cuts = range(0, max(1, len(logits)), _LOGPROB_ROWS_AT_ONCE)
    pieces = [
        _logprobs(logits[rows, :vocab_size].float(), token_ids[rows], num_top)
        for rows in (slice(cut, cut + _LOGPROB_ROWS_AT_ONCE) for cut in cuts)
    ]
    return Logprobs(
        torch.cat([piece.token_logprobs for piece in pieces]),
        torch.cat([piece.top_ids for piece in pieces]),
        torch.cat([piece.top_logprobs for piece in pieces]),
    )


def _logprobs(raw: Tensor, token_ids: Tensor, num_top: int) -> Logprobs:
    highest = raw.amax(dim=-1, keepdim=True)
    log_sum = log(sum_last_(exp(raw - highest)).double()).float()[:, None]
    top_ids = _likeliest(raw, num_top)
    token = raw.gather(1, token_ids[:, None])
    return Logprobs(
        ((token - highest) - log_sum)[:, 0],
        top_ids.to(torch.int32),
        (raw.gather(1, top_ids) - highest) - log_sum,
    )


def _likeliest(raw: Tensor, num_top: int) -> Tensor:
    """Ids by (logit descending, id ascending): no two keys are equal, so topk has no ties to break."""
    bits = (raw + 0.0).view(torch.int32).to(torch.int64)  # + 0.0 makes -0.0 equal to 0.0
    ascending = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    ids = torch.arange(raw.shape[1])
    keys = (ascending << 32) | (0xFFFFFFFF - ids)
    return keys.topk(num_top, dim=-1).indices
