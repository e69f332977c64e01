"""Where each constrained row stands in its grammar: what it may sample next, and how its grammar ends it.

Knows slots, ids and matchers; knows no logits. A row's end tokens are allowed where its grammar is complete, unless
min_tokens forbids them or ignore_eos leaves none; where a complete grammar allows nothing else, the model's end set is
allowed whatever they say, and ends the row. A row whose grammar cannot be followed ends alone.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from octavo.grammars import GrammarError
from octavo.internal.v1 import types_pb2
from worker_svc.grammar import GrammarCompiler
from worker_svc.rows import Int32Array, Int64Array

_LOG = logging.getLogger(__name__)
_NO_IDS: Int32Array = np.zeros(0, np.int32)


@dataclass
class _Row:
    """One slot. What the last mask said holds until the token that it led to is settled."""

    matcher: Future[LLMatcher]
    is_complete: bool = False
    has_failed: bool = False


class GrammarRows:
    """The constrained rows of a replica, by slot. Used by the step thread."""

    def __init__(self, num_slots: int, vocab_size: int, compiler: GrammarCompiler | None) -> None:
        """Without a `compiler`, constrained rows fail."""
        self._vocab_size = vocab_size
        self._compiler = compiler
        self._end_ids = np.array(compiler.end_ids if compiler else (), np.int64)
        self._rows: dict[int, _Row] = {}
        # [slots]: whether the row is constrained; few steps have one that is.
        self.active: npt.NDArray[np.bool_] = np.zeros(num_slots, bool)

    def admit(self, slot: int, grammar: types_pb2.Grammar | None, output_ids: Sequence[int]) -> None:
        """The row just admitted follows `grammar`, of which `output_ids` are the first tokens; None leaves it free."""
        self.drop(slot)
        if grammar is None:
            return
        if self._compiler is None:
            matcher: Future[LLMatcher] = Future()
            matcher.set_exception(GrammarError("this worker has no vocabulary for grammars"))
        else:
            matcher = self._compiler.start(grammar, output_ids)
        self._rows[slot] = _Row(matcher)
        self.active[slot] = True

    def drop(self, slot: int) -> None:
        """The slot is free again, or its row needs no more masks."""
        self._rows.pop(slot, None)
        self.active[slot] = False

    def forbidden(self, slot: int, final_ids: Int32Array, *, masks_finals: bool) -> Int32Array:
        """Ids that a constrained row may not sample now, ascending. Waits for a grammar that is still compiled.

        `final_ids` are the row's own end and stop ids, which `masks_finals` (min_tokens) forbids.
        """
        row = self._rows[slot]
        allowed = self._allowed(row)
        if allowed is None:
            row.has_failed = True
            return _NO_IDS
        is_accepting = bool(allowed[self._end_ids].any())
        allowed[self._end_ids] = False
        if masks_finals:
            allowed[final_ids] = False
        if not allowed.any():
            row.is_complete, row.has_failed = is_accepting, not is_accepting
            allowed[self._end_ids] = True
        if is_accepting and not masks_finals:
            allowed[final_ids] = True
        return np.flatnonzero(~allowed).astype(np.int32)

    def settle(self, slots: Int64Array, token_ids: Int64Array, reasons: Int64Array) -> None:
        """The rows sampled these tokens: follows those that go on, and writes into `reasons` why grammars end others.

        A row that ends for another reason is dropped.
        """
        for index in np.flatnonzero(self.active[slots]).tolist():
            slot, reason = int(slots[index]), int(reasons[index])
            row = self._rows[slot]
            if reason == types_pb2.FINISH_REASON_NUMERIC_ERROR:
                pass
            elif row.has_failed:
                reasons[index] = types_pb2.FINISH_REASON_GRAMMAR_ERROR
            elif row.is_complete and reason in (0, types_pb2.FINISH_REASON_LENGTH):
                # An end token, which ignore_eos keeps out of the row's own.
                reasons[index] = types_pb2.FINISH_REASON_END_TOKEN
            elif reason == 0 and not row.matcher.result().consume_token(int(token_ids[index])):
                reasons[index] = types_pb2.FINISH_REASON_GRAMMAR_ERROR
            if reasons[index] != 0:
                self.drop(slot)

    def _allowed(self, row: _Row) -> npt.NDArray[np.bool_] | None:
        """[vocab_size]; None for a grammar that cannot be followed any further."""
        try:
            matcher = row.matcher.result()
        except Exception as error:  # of the compiler's thread; its words may hold the grammar
            _LOG.debug("a grammar cannot be followed: %s", type(error).__name__)
            return None
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            return None
        return np.unpackbits(mask, count=self._vocab_size, bitorder="little").view(np.bool_)
