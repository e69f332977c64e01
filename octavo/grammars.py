"""From a grammar as it travels to a matcher that follows an output, within limits of work and memory.

The one place that knows llguidance: the process that checks clients' grammars for a router, and the workers, compile
through it and therefore alike. Knows no request. Grammars are clients' texts and are never logged; the library's own
words, which may hold some of them, go back to their client alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from octavo.internal.v1 import types_pb2

# The library's own limits of work for one step, 5 to 20 ms, and fewer states: one takes 1 to 2 kB for as long as its
# row lives.
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)

# Of a text that a grammar leaves no choice about, the library asks the tokens at every step: only the next matter.
_MAX_ENCODED_CHARS = 512

_LIBRARY_TEXT: Mapping[int, Callable[[str], str]] = {
    types_pb2.GRAMMAR_KIND_JSON_SCHEMA: LLMatcher.grammar_from_json_schema,
    types_pb2.GRAMMAR_KIND_REGEX: LLMatcher.grammar_from_regex,
    types_pb2.GRAMMAR_KIND_LARK: LLMatcher.grammar_from_lark,
}


class GrammarError(Exception):
    """A grammar that cannot be compiled, or has nothing to say; for its client."""


def make_vocabulary(
    tokens: Sequence[bytes], special_ids: Iterable[int], end_ids: Sequence[int], encode: Callable[[str], list[int]]
) -> LLTokenizer:
    """The library's view of a vocabulary: what token i adds to a text, b"" for ids without a token.

    Special tokens match no text, only their own name or id in a grammar; those of `end_ids` (at least one) are allowed
    where a grammar is complete. Where a grammar leaves one text alone, only the tokens that `encode` makes of it are
    allowed: those that the model knows it by. Takes about a second for 128,000 tokens.
    """
    source = _Tokens(tokens, frozenset(special_ids), end_ids[0], encode)
    vocabulary = LLTokenizer(TokenizerWrapper(source), eos_token=list(end_ids))
    source.encode_greedily = vocabulary.greedy_tokenize
    return vocabulary


def compile_grammar(vocabulary: LLTokenizer, grammar: types_pb2.Grammar) -> LLMatcher:
    """A matcher at the grammar's start; `deep_copy` it for each output. Raises GrammarError."""
    if grammar.kind not in _LIBRARY_TEXT:
        raise GrammarError(f"a grammar of kind {grammar.kind} is not one that can be compiled")
    try:
        text = _LIBRARY_TEXT[grammar.kind](grammar.text)
        if grammar.HasField("thinking"):
            text = _behind_thinking(grammar.thinking, text)
    except ValueError as error:
        raise GrammarError(str(error)) from None
    matcher = LLMatcher(vocabulary, text, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise GrammarError(matcher.get_error())
    return matcher


def _behind_thinking(thinking: types_pb2.Thinking, text: str) -> str:
    """The library's text of a grammar, with free text before it that ends with the first closer.

    A closer that is a special token is only ever that token: the text before it may not spell it, for readers of the
    answer would take it for the end.
    """
    own: list[dict[str, Any]] = json.loads(text)["grammars"] if text.startswith("{") else [{"lark_grammar": text}]
    named = [{**own[0], "name": "answer"}, *own[1:]]
    closer = thinking.closer
    opener = (
        f"<[{thinking.opener_id}]>"
        if thinking.HasField("opener_id")
        else json.dumps(thinking.opener, ensure_ascii=False)
    )
    if not thinking.is_open:
        start = f"start: ({opener} thinking BLANKS?)? @answer"
    elif thinking.HasField("opener_id"):  # a model may write what its template has written already
        start = f"start: {opener}? thinking BLANKS? @answer"
    else:
        start = "start: thinking BLANKS? @answer"
    rules = [start, r"BLANKS: /[ \t\r\n]{1,16}/"]
    if thinking.HasField("closer_id"):
        rules.append(f"thinking: THOUGHT? <[{thinking.closer_id}]>")
        rules.append(rf"THOUGHT: /(?s:.+)/ & ~/(?s:.*){_escaped(closer)}(?s:.*)/")
    else:
        rules.append(f"thinking[suffix={json.dumps(closer, ensure_ascii=False)}]: /(?s:.*)/")
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(rules)}, *named]})


def _escaped(text: str) -> str:
    """The text as a regular expression between slashes. Angle brackets stand for themselves; escaped, for borders."""
    return re.sub(r"[!-/:;=?@\[-^`{-~]", lambda found: "\\" + found.group(), text)


class _Tokens:
    """What llguidance wants of a tokenizer."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special_ids: frozenset[int], end_id: int, encode: Callable[[str], list[int]]
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = end_id
        self.encode_greedily: Callable[[str], list[int]] = lambda text: []
        self._special_ids = special_ids
        self._encode = encode

    def __call__(self, text: bytes) -> list[int]:
        """Tokens that are exactly this text in the middle of another, none of them special.

        A tokenizer may put a blank before what it takes for the start of a text, normalise it, or find a control token
        in it; the longest tokens one after the other are as right then, if less usual.
        """
        whole = text.decode()
        head, rest = whole[:_MAX_ENCODED_CHARS], whole[_MAX_ENCODED_CHARS:]
        ids = self._encode(head)
        is_exact = b"".join([self.tokens[token_id] for token_id in ids]) == head.encode()
        if not is_exact or not self._special_ids.isdisjoint(ids):
            ids = self.encode_greedily(head)
        return ids + self.encode_greedily(rest) if rest else ids
