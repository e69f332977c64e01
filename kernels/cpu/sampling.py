"""Sampling and logprobs through the extension: checks shapes, passes addresses, owns the results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import contracts
from kernels.api import Logprobs, Samples, SamplingBatch
from kernels.cpu.dtypes import dtype_code
from kernels.cpu.extension import native

_MAX_ALTERNATIVES = 256

# The tensors of SamplingBatch in the order in which the extension takes them, and their types. The first nine and the
# prompt lengths have one element a row, `*_starts` one more.
_FIELDS = (
    ("temperatures", torch.float32),
    ("top_ks", torch.int32),
    ("top_ps", torch.float32),
    ("min_ps", torch.float32),
    ("seeds", torch.int64),
    ("positions", torch.int64),
    ("repetition_penalties", torch.float32),
    ("frequency_penalties", torch.float32),
    ("presence_penalties", torch.float32),
    ("history_starts", torch.int32),
    ("history_ids", torch.int32),
    ("history_prompt_lens", torch.int32),
    ("bias_starts", torch.int32),
    ("bias_ids", torch.int32),
    ("bias_values", torch.float32),
    ("forbidden_starts", torch.int32),
    ("forbidden_ids", torch.int32),
)
_RAGGED = frozenset({"history_ids", "bias_ids", "bias_values", "forbidden_ids"})


@dataclass(frozen=True)
class CheckedBatch:
    """A batch whose tensors fit `num_rows` rows, and their addresses. Most decode steps have the last step's batch."""

    batch: SamplingBatch
    num_rows: int
    addresses: tuple[int, ...]


def check(batch: SamplingBatch, num_rows: int) -> CheckedBatch:
    """Raises ValueError for a tensor of another type or length."""
    return CheckedBatch(batch, num_rows, tuple(_address(batch, name, dtype, num_rows) for name, dtype in _FIELDS))


def sample(context: int, logits: Tensor, checked: CheckedBatch) -> Samples:
    """One token per row of [B, padded_vocab]."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    batch, num_rows, addresses = checked.batch, checked.num_rows, checked.addresses
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    finite = torch.empty(num_rows, dtype=torch.bool)
    row_arguments = _row_arguments(logits, batch.vocab_size)
    native().sample(context, *row_arguments, *addresses, token_ids.data_ptr(), finite.data_ptr())
    wanted = batch.logprob_rows
    if not len(wanted):
        return Samples(token_ids, finite, None)
    if (
        wanted.dtype != torch.int32
        or not wanted.is_contiguous()
        or int(wanted.min()) < 0
        or int(wanted[-1]) >= num_rows
    ):
        raise ValueError(f"logprob_rows must be ascending int32 rows below {num_rows}, is {wanted}")
    results = _logprobs(context, row_arguments, wanted, token_ids, batch.num_top)
    return Samples(token_ids, finite, results)


def logprobs(context: int, logits: Tensor, token_ids: Tensor, num_top: int, vocab_size: int) -> Logprobs:
    """Of given tokens [L] under the rows of [L, padded_vocab]. Raises ValueError for ids outside the vocabulary."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    token_ids = token_ids.to(torch.int64).contiguous()
    contracts.check_token_ids(token_ids, logits)
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ValueError(f"token_ids must lie in 0..{vocab_size - 1}")
    return _logprobs(context, _row_arguments(logits, vocab_size), None, token_ids, num_top)


def _row_arguments(logits: Tensor, vocab_size: int) -> tuple[int, int, int, int, int]:
    """Address, rows, stride, type and vocabulary."""
    contracts.check_logits(logits, vocab_size)
    return logits.data_ptr(), logits.shape[0], logits.stride(0), dtype_code(logits.dtype), vocab_size


def _logprobs(
    context: int, row_arguments: tuple[int, int, int, int, int], rows: Tensor | None, token_ids: Tensor, num_top: int
) -> Logprobs:
    vocab_size = row_arguments[4]
    contracts.check_num_top(num_top, min(vocab_size, _MAX_ALTERNATIVES))
    count = len(token_ids) if rows is None else len(rows)
    result = Logprobs(
        torch.empty(count, dtype=torch.float32),
        torch.empty(count, num_top, dtype=torch.int32),
        torch.empty(count, num_top, dtype=torch.float32),
    )
    native().logprobs(
        context,
        *row_arguments,
        count,
        0 if rows is None else rows.data_ptr(),
        token_ids.data_ptr(),
        num_top,
        result.token_logprobs.data_ptr(),
        result.top_ids.data_ptr(),
        result.top_logprobs.data_ptr(),
    )
    return result


def _address(batch: SamplingBatch, name: str, dtype: torch.dtype, num_rows: int) -> int:
    tensor: Tensor = getattr(batch, name)
    length = len(tensor) if name in _RAGGED else num_rows + name.endswith("_starts")
    if tensor.dtype != dtype or len(tensor) != length or not tensor.is_contiguous():
        raise ValueError(f"{name} must be {length} contiguous {dtype}, is {tuple(tensor.shape)} {tensor.dtype}")
    return tensor.data_ptr()
