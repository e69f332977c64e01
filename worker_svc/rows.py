"""The worker's rows: what is known of the sequence in each slot, as preallocated arrays indexed by slot.

One owner, the step thread. A plan is a delta on these rows; one that disagrees with them raises PlanError and changes
nothing that survives it, for the worker then drops everything. Knows tokens and blocks; no tensors on a device, no
sampling, no sockets.

    EMPTY --admit--> LIVE --end--> ENDED      an ended row produces nothing, though a plan in flight may name it
      ^---------------release------------'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


class PlanError(Exception):
    """A plan disagrees with the worker's rows: the connection must end. Names slot and both numbers."""


class RowState(IntEnum):
    """What a slot holds."""

    EMPTY = 0
    LIVE = 1
    ENDED = 2


@dataclass(frozen=True)
class RowLimits:
    """The sizes that rows are held to, as Hello announced them."""

    num_slots: int
    max_model_len: int
    block_size: int
    num_blocks: int
    vocab_size: int

    @property
    def max_blocks_per_row(self) -> int:
        return -(-self.max_model_len // self.block_size)


class RowTable:
    """Per-slot state. Arrays are read by whoever builds batches; only these methods and `commit` write.

    token_ids     [slots, max_model_len]  prompt, then output
    block_tables  [slots, max_blocks]     device block ids in order
    num_tokens, num_prompt_tokens, num_computed_tokens, num_blocks, states  [slots]
    num_settled_tokens  [slots]           those whose ids are known here; a later one is still being sampled
    num_admissions      [slots]           how many sequences the slot has held
    """

    def __init__(self, limits: RowLimits) -> None:
        self.limits = limits
        slots = limits.num_slots
        self.token_ids: Int32Array = np.zeros((slots, limits.max_model_len), np.int32)
        self.block_tables: Int32Array = np.zeros((slots, limits.max_blocks_per_row), np.int32)
        self.num_tokens: Int64Array = np.zeros(slots, np.int64)
        self.num_prompt_tokens: Int64Array = np.zeros(slots, np.int64)
        self.num_computed_tokens: Int64Array = np.zeros(slots, np.int64)
        self.num_blocks: Int64Array = np.zeros(slots, np.int64)
        self.states: npt.NDArray[np.uint8] = np.zeros(slots, np.uint8)
        self.num_settled_tokens: Int64Array = np.zeros(slots, np.int64)
        self.num_admissions: Int64Array = np.zeros(slots, np.int64)

    @property
    def num_live(self) -> int:
        """Rows that have not ended."""
        return int(np.count_nonzero(self.states == RowState.LIVE))

    def reset(self) -> None:
        """Empties every slot."""
        self.states[:] = RowState.EMPTY

    def admit(
        self, slot: int, token_ids: Sequence[int], num_prompt: int, num_computed: int, block_ids: Sequence[int]
    ) -> None:
        """Fills an empty slot with a sequence whose first `num_computed` tokens' KV is in its blocks already."""
        self._require(slot, RowState.EMPTY, "admits into it")
        tokens = np.asarray(token_ids, np.int64)
        self._check_admission(slot, tokens, num_prompt, num_computed, len(block_ids))
        self.token_ids[slot, : len(tokens)] = tokens
        self.num_tokens[slot] = self.num_settled_tokens[slot] = len(tokens)
        self.num_admissions[slot] += 1
        self.num_prompt_tokens[slot] = num_prompt
        self.num_computed_tokens[slot] = num_computed
        self.num_blocks[slot] = 0
        self.states[slot] = RowState.LIVE
        self.append_blocks(slot, block_ids)

    def append_blocks(self, slot: int, block_ids: Sequence[int]) -> None:
        """Adds blocks at the end of the row's table; an ended row takes them too, until it is released."""
        self._require_held(slot, "appends blocks to it")
        if not len(block_ids):
            return
        blocks = np.asarray(block_ids, np.int64)
        first = int(self.num_blocks[slot])
        end = first + len(blocks)
        if end > self.limits.max_blocks_per_row:
            raise PlanError(f"slot {slot}: {end} blocks, the longest sequence has {self.limits.max_blocks_per_row}")
        if blocks.max() >= self.limits.num_blocks:
            raise PlanError(f"slot {slot}: block {blocks.max()}, the cache has {self.limits.num_blocks}")
        self.block_tables[slot, first:end] = blocks
        self.num_blocks[slot] = end

    def release(self, slot: int) -> None:
        """Empties a slot, whether or not its row had ended."""
        self._require_held(slot, "releases it")
        self.states[slot] = RowState.EMPTY

    def end(self, slot: int) -> None:
        """The row produces nothing more, whatever plans in flight say of it."""
        self._require(slot, RowState.LIVE, "ends it")
        self.states[slot] = RowState.ENDED

    def check_run(self, slots: Int64Array, starts: Int64Array, counts: Int64Array) -> None:
        """That the live rows among `slots` agree with the plan's starts, and have tokens and blocks for its counts."""
        if len(set(slots.tolist())) != len(slots):
            raise PlanError(f"slot {_first_repeated(slots)}: the plan runs it twice in one step")
        ends = starts + counts
        limits = np.minimum(self.num_tokens[slots], self.num_blocks[slots] * self.limits.block_size)
        agrees = (starts == self.num_computed_tokens[slots]) & (counts > 0) & (ends <= limits)
        if (agrees & (self.states[slots] == RowState.LIVE)).all():
            return
        self._check_each(slots, starts, counts)

    def _check_each(self, slots: Int64Array, starts: Int64Array, counts: Int64Array) -> None:
        """What check_run checks, one after the other: passes over ended rows and says what is wrong."""
        held = self.states[slots]
        self._check_all(slots, held != RowState.EMPTY, held, "the plan runs it, the worker has state {} there")
        live = held == RowState.LIVE
        slots, starts, counts = slots[live], starts[live], counts[live]
        computed, known = self.num_computed_tokens[slots], self.num_tokens[slots]
        self._check_all(
            slots, starts == computed, starts, "the plan starts at {}, the worker has computed {}", computed
        )
        ends = starts + counts
        self._check_all(slots, counts > 0, counts, "the plan runs {} tokens")
        self._check_all(slots, ends <= known, ends, "the plan runs up to {}, the row has {} known tokens", known)
        room = self.num_blocks[slots] * self.limits.block_size
        self._check_all(slots, ends <= room, ends, "the plan runs up to {}, the row's blocks hold {} tokens", room)

    def commit(self, slots: Int64Array, counts: Int64Array) -> None:
        """The KV of `counts` more tokens of each row is in the cache."""
        self.num_computed_tokens[slots] += counts

    def append_tokens(self, slots: Int64Array, token_ids: Int64Array) -> None:
        """One sampled token for each row; there must be room, which ending at the context length keeps true."""
        self.expect_tokens(slots)
        self.settle_tokens(slots, token_ids)

    def expect_tokens(self, slots: Int64Array) -> None:
        """One more token for each row, which is being sampled."""
        self.num_tokens[slots] += 1

    def settle_tokens(self, slots: Int64Array, token_ids: Int64Array) -> None:
        """The first token of each row that was expected."""
        self.token_ids[slots, self.num_settled_tokens[slots]] = token_ids
        self.num_settled_tokens[slots] += 1

    def _check_admission(
        self, slot: int, tokens: Int64Array, num_prompt: int, num_computed: int, num_blocks: int
    ) -> None:
        limits = self.limits
        if not 0 < len(tokens) < limits.max_model_len:
            raise PlanError(f"slot {slot}: {len(tokens)} tokens, expected 1 to {limits.max_model_len - 1}")
        if tokens.max() >= limits.vocab_size:
            raise PlanError(f"slot {slot}: token id {tokens.max()}, the vocabulary has {limits.vocab_size}")
        if not 0 < num_prompt <= len(tokens):
            raise PlanError(f"slot {slot}: {num_prompt} prompt tokens of {len(tokens)}")
        if num_computed % limits.block_size or not num_computed < len(tokens):
            raise PlanError(
                f"slot {slot}: {num_computed} computed tokens of {len(tokens)}, expected a multiple of the block size "
                f"{limits.block_size} below that"
            )
        if num_blocks * limits.block_size < num_computed:
            raise PlanError(f"slot {slot}: {num_blocks} blocks do not hold {num_computed} computed tokens")

    def _require(self, slot: int, state: RowState, what: str) -> None:
        self._require_known(slot)
        if self.states[slot] != state:
            raise PlanError(f"slot {slot}: the plan {what}, it is {RowState(self.states[slot]).name}, not {state.name}")

    def _require_held(self, slot: int, what: str) -> None:
        self._require_known(slot)
        if self.states[slot] == RowState.EMPTY:
            raise PlanError(f"slot {slot}: the plan {what}, it is {RowState.EMPTY.name}")

    def _require_known(self, slot: int) -> None:
        if not 0 <= slot < self.limits.num_slots:
            raise PlanError(f"slot {slot}: the worker has {self.limits.num_slots} slots")

    @staticmethod
    def _check_all(
        slots: Int64Array,
        agrees: npt.NDArray[np.bool_],
        theirs: npt.NDArray[np.integer],
        message: str,
        ours: Int64Array | None = None,
    ) -> None:
        if agrees.all():
            return
        row = int(np.argmin(agrees))
        numbers = [theirs[row]] if ours is None else [theirs[row], ours[row]]
        raise PlanError(f"slot {slots[row]}: {message.format(*numbers)}")


def _first_repeated(slots: Int64Array) -> int:
    values, counts = np.unique(slots, return_counts=True)
    return int(values[counts > 1][0])
