"""Grammars on their way to the rows: the vocabulary as grammars see it, compiled grammars, prior tokens replayed.

All of it in threads of its own, so that the step thread waits only for what a row needs at its first sampled token.
Knows files and `octavo.grammars`; knows no rows and no sampling. Grammars are clients' texts: never logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from octavo.grammars import GrammarError, compile_grammar, make_vocabulary
from octavo.internal.v1 import types_pb2
from octavo.special_tokens import flag_special_tokens, is_control_shaped, named_special_tokens
from octavo.token_bytes import TokenBytes, UnsupportedDecoder

_LOG = logging.getLogger(__name__)

NUM_KEPT = 128
_NUM_THREADS = 2


class GrammarCompiler:
    """One per worker. Called by the step thread alone; what it returns is ready when it is ready."""

    def __init__(
        self, load_vocabulary: Callable[[], LLTokenizer], end_ids: Sequence[int], leisure_s: float = 0.0
    ) -> None:
        """`end_ids`: the model's end set, which may end any grammar.

        The vocabulary is loaded for the first grammar, and without one after `leisure_s`: until then others may need
        the cores more.
        """
        self.end_ids = tuple(end_ids)
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        self._load_vocabulary = load_vocabulary
        self._loading = threading.Lock()
        self._vocabulary: Future[LLTokenizer] | None = None
        self._timer = threading.Timer(leisure_s, self._load_at_leisure)
        self._timer.daemon = True
        self._timer.start()
        # By digest, the latest used last: matchers at their grammar's start, of which rows get copies.
        self._compiled: OrderedDict[bytes, Future[LLMatcher]] = OrderedDict()

    def start(self, grammar: types_pb2.Grammar, output_ids: Sequence[int]) -> Future[LLMatcher]:
        """A matcher of its own that has taken these tokens; its first mask is computed. Fails with GrammarError."""
        # Tasks wait only for tasks that were handed in before them, so some thread always runs.
        compiled = self._compile(grammar)
        return self._pool.submit(_replay, compiled, list(output_ids))

    def close(self) -> None:
        """Ends the threads when they have done what they do."""
        self._timer.cancel()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load_at_leisure(self) -> None:
        with contextlib.suppress(RuntimeError):  # closed meanwhile
            self._begin_to_load()

    def _begin_to_load(self) -> Future[LLTokenizer]:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._pool.submit(self._load_vocabulary)
                self._vocabulary.add_done_callback(_warn_of)
            return self._vocabulary

    def _compile(self, grammar: types_pb2.Grammar) -> Future[LLMatcher]:
        key = hashlib.sha256(grammar.SerializeToString(deterministic=True)).digest()
        compiled = self._compiled.get(key)
        if compiled is None:
            vocabulary = self._begin_to_load()
            compiled = self._pool.submit(lambda: compile_grammar(vocabulary.result(), grammar))
            self._compiled[key] = compiled
            while len(self._compiled) > NUM_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return compiled


def load_grammar_vocabulary(directory: Path, vocab_size: int, end_ids: Sequence[int]) -> LLTokenizer:
    """The vocabulary of a model directory, ids below `vocab_size`.

    Raises GrammarError for a model without end tokens, or whose tokens have no bytes of their own.
    """
    if not end_ids:
        raise GrammarError("the model has no end tokens, so nothing could end an answer")
    backend = Tokenizer.from_file(str(directory / "tokenizer.json"))
    config, special_map = (_read(directory / name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    flag_special_tokens(backend, config, named_special_tokens(special_map, config))
    added = backend.get_added_tokens_decoder().items()
    special_ids = {token_id for token_id, token in added if token.special or is_control_shaped(token.content)}
    table = TokenBytes(backend)
    try:
        tokens = [table[token_id] for token_id in range(vocab_size)]
    except UnsupportedDecoder as error:
        raise GrammarError(str(error)) from None
    special_ids = {token_id for token_id in special_ids if token_id < vocab_size} | set(end_ids)
    return make_vocabulary(
        tokens, special_ids, end_ids, lambda text: backend.encode(text, add_special_tokens=False).ids
    )


def _replay(compiled: Future[LLMatcher], output_ids: list[int]) -> LLMatcher:
    matcher = compiled.result().deep_copy()
    if matcher.try_consume_tokens(output_ids) != len(output_ids):
        raise GrammarError("the tokens so far do not follow the grammar")
    matcher.compute_bitmask()  # what it works out stays with the matcher
    return matcher


def _read(path: Path) -> dict[str, object]:
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _warn_of(vocabulary: Future[LLTokenizer]) -> None:
    if not vocabulary.cancelled() and (error := vocabulary.exception()):
        _LOG.warning("answers cannot be held to grammars: %s", error)
