"""Each slot's sampling parameters, as arrays and small sets; and the SamplingBatch of a step's sampling rows.

Knows SamplingParams and what the kernel API wants. Whether a sequence ends is decided here too (`finish_reasons`), for
it is a function of the parameters and the token. Knows no plan and no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.api import SamplingBatch
from octavo.internal.v1 import types_pb2
from worker_svc.grammar import GrammarCompiler
from worker_svc.grammar_rows import GrammarRows
from worker_svc.rows import Int32Array, Int64Array, PlanError, RowTable

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class PromptLogprobRequest:
    """Which prompt positions' logprobs a sequence wants: from `start`, with `num_top` alternatives."""

    start: int
    num_top: int


@dataclass(frozen=True)
class SlotSampling:
    """What does not fit a fixed-width array: lists, sets and requests of one slot."""

    bias_ids: Int32Array
    bias_values: FloatArray
    end_ids: frozenset[int]
    stop_ids: frozenset[int]
    # Union of both, ascending: what min_tokens forbids.
    final_ids: Int32Array
    has_penalty: bool
    # Alternatives with each sampled token; None: no logprobs.
    num_logprobs: int | None
    prompt_logprobs: PromptLogprobRequest | None


@dataclass(frozen=True)
class _Group:
    """What admission decided for the rows in `slots` (an array's bytes).

    The batch has no histories and forbidden ids; its positions are overwritten from step to step.
    """

    slots: bytes
    own: tuple[SlotSampling, ...]
    penalised: npt.NDArray[np.bool_]
    batch: SamplingBatch


class SamplingTable:
    """The parameters of every slot. Written at admission, read by slot until the next."""

    def __init__(self, rows: RowTable, compiler: GrammarCompiler | None = None) -> None:
        self._rows = rows
        self._grammars = GrammarRows(rows.limits.num_slots, rows.limits.vocab_size, compiler)
        slots = rows.limits.num_slots
        self._temperatures: FloatArray = np.zeros(slots, np.float32)
        self._top_ks: Int32Array = np.zeros(slots, np.int32)
        self._top_ps: FloatArray = np.ones(slots, np.float32)
        self._min_ps: FloatArray = np.zeros(slots, np.float32)
        self._seeds: Int64Array = np.zeros(slots, np.int64)
        self._repetition_penalties: FloatArray = np.ones(slots, np.float32)
        self._frequency_penalties: FloatArray = np.zeros(slots, np.float32)
        self._presence_penalties: FloatArray = np.zeros(slots, np.float32)
        # Tokens, prompt and output, at which the row ends for its length.
        self._longest: Int64Array = np.zeros(slots, np.int64)
        self._min_tokens: Int64Array = np.zeros(slots, np.int64)
        self._slots: list[SlotSampling | None] = [None] * slots
        # [vocab_size]: ids that are, or once were, an end or stop id of some row. Few tokens need a closer look.
        self._ends_some: npt.NDArray[np.bool_] = np.zeros(rows.limits.vocab_size, bool)
        # Of the last step's rows: from one decode step to the next they are mostly the same.
        self._group: _Group | None = None
        self._has_penalty: npt.NDArray[np.bool_] = np.zeros(slots, bool)
        # [slots]: whether the row wants logprobs of prompt tokens; few steps have one that does.
        self.wants_prompt_logprobs: npt.NDArray[np.bool_] = np.zeros(slots, bool)

    def __getitem__(self, slot: int) -> SlotSampling:
        """The lists and sets of an admitted slot."""
        sampling = self._slots[slot]
        if sampling is None:
            raise PlanError(f"slot {slot}: it was never admitted")
        return sampling

    def admit(self, slot: int, params: types_pb2.SamplingParams) -> None:
        """Takes the parameters of the row just admitted. Raises PlanError for what the kernels could not index."""
        num_outputs = int(self._rows.num_tokens[slot] - self._rows.num_prompt_tokens[slot])
        if num_outputs >= params.max_tokens:
            raise PlanError(f"slot {slot}: {num_outputs} output tokens, max_tokens is {params.max_tokens}")
        own = self._slot_sampling(slot, params)
        self._slots[slot], self._group = own, None
        self._has_penalty[slot] = own.has_penalty
        self._ends_some[own.final_ids] = True
        self._temperatures[slot] = params.temperature
        self._top_ks[slot] = min(params.top_k, self._rows.limits.vocab_size)
        self._top_ps[slot] = params.top_p
        self._min_ps[slot] = params.min_p
        self._seeds[slot] = np.uint64(params.seed).astype(np.int64)
        self._repetition_penalties[slot] = params.repetition_penalty
        self._frequency_penalties[slot] = params.frequency_penalty
        self._presence_penalties[slot] = params.presence_penalty
        num_prompt = int(self._rows.num_prompt_tokens[slot])
        self._longest[slot] = min(num_prompt + params.max_tokens, self._rows.limits.max_model_len)
        self._min_tokens[slot] = params.min_tokens
        self.wants_prompt_logprobs[slot] = params.HasField("num_prompt_logprobs")
        self._grammars.admit(
            slot,
            params.grammar if params.HasField("grammar") else None,
            self._rows.token_ids[slot, num_prompt : num_prompt + num_outputs].tolist(),
        )

    def release(self, slot: int) -> None:
        """The slot is free: what its row held is."""
        self._grammars.drop(slot)

    def batch(self, slots: Int64Array) -> SamplingBatch:
        """How the next token of each of these rows is chosen; before their tokens are appended."""
        group = self._group
        if group is None or group.slots != slots.tobytes():
            group = self._group = self._make_group(slots)
        rows = self._rows
        num_tokens = rows.num_tokens[slots]
        batch = group.batch
        batch.positions.numpy()[:] = num_tokens
        if group.penalised.any():
            histories = [
                rows.token_ids[slot, :length] if penalised else _NO_IDS
                for slot, length, penalised in zip(
                    slots.tolist(), num_tokens.tolist(), group.penalised.tolist(), strict=True
                )
            ]
            batch = replace(batch, history_starts=_starts(histories), history_ids=_joined(histories, np.int32))
        masked = (num_tokens - rows.num_prompt_tokens[slots]) < self._min_tokens[slots]
        constrained = self._grammars.active[slots]
        if masked.any() or constrained.any():
            forbidden = [
                self._grammars.forbidden(slot, own.final_ids, masks_finals=is_masked)
                if is_constrained
                else (own.final_ids if is_masked else _NO_IDS)
                for slot, own, is_masked, is_constrained in zip(
                    slots.tolist(), group.own, masked.tolist(), constrained.tolist(), strict=True
                )
            ]
            batch = replace(batch, forbidden_starts=_starts(forbidden), forbidden_ids=_joined(forbidden, np.int32))
        return batch

    def _make_group(self, slots: Int64Array) -> _Group:
        rows = self._rows
        own = tuple(self[slot] for slot in slots.tolist())
        penalised = np.array([s.has_penalty for s in own], bool)
        logprob_rows = [i for i, s in enumerate(own) if s.num_logprobs is not None]
        num_top = max((own[i].num_logprobs or 0 for i in logprob_rows), default=0)
        nothing = [_NO_IDS] * len(own)
        batch = SamplingBatch(
            temperatures=torch.from_numpy(self._temperatures[slots]),
            top_ks=torch.from_numpy(self._top_ks[slots]),
            top_ps=torch.from_numpy(self._top_ps[slots]),
            min_ps=torch.from_numpy(self._min_ps[slots]),
            seeds=torch.from_numpy(self._seeds[slots]),
            positions=torch.from_numpy(rows.num_tokens[slots]),
            repetition_penalties=torch.from_numpy(self._repetition_penalties[slots]),
            frequency_penalties=torch.from_numpy(self._frequency_penalties[slots]),
            presence_penalties=torch.from_numpy(self._presence_penalties[slots]),
            history_starts=_starts(nothing),
            history_ids=_joined(nothing, np.int32),
            history_prompt_lens=torch.from_numpy(
                np.where(penalised, rows.num_prompt_tokens[slots], 0).astype(np.int32)
            ),
            bias_starts=_starts([s.bias_ids for s in own]),
            bias_ids=_joined([s.bias_ids for s in own], np.int32),
            bias_values=_joined([s.bias_values for s in own], np.float32),
            forbidden_starts=_starts(nothing),
            forbidden_ids=_joined(nothing, np.int32),
            logprob_rows=torch.tensor(logprob_rows, dtype=torch.int32),
            num_top=min(num_top, rows.limits.vocab_size),
            vocab_size=rows.limits.vocab_size,
        )
        return _Group(slots.tobytes(), own, penalised, batch)

    def needs_settled(self, slots: Int64Array) -> bool:
        """Whether what one of these rows may sample depends on the tokens before, not on their number alone."""
        return bool((self._has_penalty[slots] | self._grammars.active[slots]).any())

    def at_length(self, slots: Int64Array, num_tokens: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether each row ends with its `num_tokens`-th token, whatever that is."""
        return num_tokens >= self._longest[slots]

    def finish_reasons(
        self, slots: Int64Array, token_ids: Int64Array, finite: npt.NDArray[np.bool_], num_tokens: Int64Array
    ) -> Int64Array:
        """Why each row ends with this token, its `num_tokens`-th (a FinishReason), or 0.

        Once for each token, for rows' grammars follow it. The end set comes before the request's stop ids, and both
        before a length: a sequence whose last permitted token is an end token ended by it.
        """
        reasons = self.at_length(slots, num_tokens) * np.int64(types_pb2.FINISH_REASON_LENGTH)
        if not finite.all():
            # Their token ids mean nothing.
            token_ids = np.where(finite, token_ids, 0)
        for index in np.flatnonzero(self._ends_some[token_ids]).tolist():
            own, token_id = self[int(slots[index])], int(token_ids[index])
            if token_id in own.end_ids:
                reasons[index] = types_pb2.FINISH_REASON_END_TOKEN
            elif token_id in own.stop_ids:
                reasons[index] = types_pb2.FINISH_REASON_STOP_TOKEN
        reasons[~finite] = types_pb2.FINISH_REASON_NUMERIC_ERROR
        if self._grammars.active[slots].any():
            self._grammars.settle(slots, token_ids, reasons)
        return reasons

    def _slot_sampling(self, slot: int, params: types_pb2.SamplingParams) -> SlotSampling:
        if len(params.bias_token_ids) != len(params.bias_values):
            raise PlanError(
                f"slot {slot}: {len(params.bias_token_ids)} ids in the logit bias, {len(params.bias_values)} values"
            )
        self._check_ids(slot, "logit bias", params.bias_token_ids)
        self._check_ids(slot, "end set", params.end_token_ids)
        self._check_ids(slot, "stop ids", params.stop_token_ids)
        has_prompt_logprobs = params.HasField("num_prompt_logprobs")
        return SlotSampling(
            bias_ids=np.array(params.bias_token_ids, np.int32),
            bias_values=np.array(params.bias_values, np.float32),
            end_ids=frozenset(params.end_token_ids),
            stop_ids=frozenset(params.stop_token_ids),
            final_ids=np.array(sorted({*params.end_token_ids, *params.stop_token_ids}), np.int32),
            has_penalty=(params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1, 0, 0),
            num_logprobs=params.num_logprobs if params.HasField("num_logprobs") else None,
            prompt_logprobs=PromptLogprobRequest(params.prompt_logprobs_start, params.num_prompt_logprobs)
            if has_prompt_logprobs
            else None,
        )

    def _check_ids(self, slot: int, what: str, ids: Sequence[int]) -> None:
        if len(ids) and max(ids) >= self._rows.limits.vocab_size:
            raise PlanError(
                f"slot {slot}: id {max(ids)} in the {what}, the vocabulary has {self._rows.limits.vocab_size}"
            )


_NO_IDS: Int32Array = np.zeros(0, np.int32)


def _starts(lists: Sequence[npt.NDArray[np.generic]]) -> Tensor:
    starts = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(values) for values in lists], out=starts[1:])
    return torch.from_numpy(starts)


def _joined(lists: Sequence[npt.NDArray[np.generic]], dtype: type[np.generic]) -> Tensor:
    filled = [values for values in lists if len(values)]
    return torch.from_numpy(np.concatenate(filled) if filled else np.zeros(0, dtype))
