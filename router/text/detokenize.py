"""Token ids to text as they arrive, in time proportional to the new tokens.

Knows bytes and UTF-8. Deltas joined are decode(prompt + output) without decode(prompt): the prompt only says whether
the output opens the text (SentencePiece drops a blank there and nowhere else) and which bytes of an unfinished
character its end holds. A delta never splits a code point; bytes become U+FFFD only when no later token can complete
them. Text of the prompt never appears, save the one character that the output completes.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from itertools import filterfalse
from typing import NamedTuple

from octavo.token_bytes import TokenBytes
from router.text.stop import StopMatcher

_MAX_UTF8_BYTES = 4
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Follows one sequence. Store little: a few bytes of an unfinished character, and the state of the text's start."""

    def __init__(
        self, table: TokenBytes, prompt_ids: Sequence[int] = (), hidden_ids: frozenset[int] = frozenset()
    ) -> None:
        """`hidden_ids` add no text (special tokens, where they are skipped). No `prompt_ids`: the output opens the
        text.
        """
        self._table = table
        self._is_hidden = hidden_ids.__contains__
        start = _TextStart(table)
        for token_id in filterfalse(self._is_hidden, prompt_ids):
            if not start.open:
                break
            start.take(token_id)
        self._bytes_of = start.take if start.open else table.__getitem__
        self._prompt_tail = self._unfinished_tail(prompt_ids)
        self._pending = b""

    def push(self, ids: Iterable[int]) -> str:
        """The text that these next tokens make certain."""
        data = b"".join(map(self._bytes_of, filterfalse(self._is_hidden, ids)))
        if not data:
            return ""
        if self._prompt_tail:
            data = self._join_prompt_tail(data)
        if self._pending:
            data = self._pending + data
        text, num_used = utf_8_decode(data, "replace", False)
        self._pending = data[num_used:]
        return text

    def flush(self) -> str:
        """No more tokens will come: what is unfinished becomes U+FFFD. An unfinished character of the prompt is
        dropped.
        """
        pending, self._pending = self._pending, b""
        self._prompt_tail = b""
        return pending.decode("utf-8", "replace")

    def _join_prompt_tail(self, data: bytes) -> bytes:
        """Put the prompt's unfinished bytes before `data` if its first byte carries them on; else they never show."""
        tail, self._prompt_tail = self._prompt_tail, b""
        text, _ = utf_8_decode(tail + data[:1], "replace", False)
        return data if text.startswith(_REPLACEMENT) else tail + data

    def _unfinished_tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The bytes of the incomplete character at the end of the prompt, at most three."""
        tail = b""
        for token_id in filterfalse(self._is_hidden, reversed(prompt_ids)):
            if len(tail) >= _MAX_UTF8_BYTES:
                break
            tail = self._table[token_id] + tail
        tail = tail[-_MAX_UTF8_BYTES:]
        _, num_used = utf_8_decode(tail, "replace", False)
        return tail[num_used:]


class _TextStart:
    """What the start of a whole text loses. `open` while the next token may still lose something."""

    def __init__(self, table: TokenBytes) -> None:
        self._table = table
        self._blanks_left = table.start_blanks
        self._is_first = True
        self.open = table.strips_start

    def take(self, token_id: int) -> bytes:
        """The bytes that the next visible token adds."""
        data = self._table.first(token_id) if self._is_first else self._table[token_id]
        self._is_first = False
        while self._blanks_left and data.startswith(b" "):
            data = data[1:]
            self._blanks_left -= 1
        if data:
            self._blanks_left = 0
        self.open = self._blanks_left > 0
        return data


class TextStep(NamedTuple):
    """What some tokens add to one sequence.

    `text` may be shown now. `stop` is the stop string that ended the sequence, else None. `num_tokens` counts the
    tokens used: up to and with the one that completed the stop string, all of them otherwise.
    """

    text: str
    stop: str | None
    num_tokens: int


class OutputText:
    """Detokenizer and stop strings of one sequence, with the `min_tokens` rule between them."""

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, min_tokens: int = 0) -> None:
        """A stop string completed by a token before the `min_tokens`-th generated one is ignored."""
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._watches = matcher.watches
        self._min_tokens = min_tokens
        self.num_tokens = 0
        """Generated tokens used so far."""

    def push(self, ids: Sequence[int]) -> TextStep:
        """Take the next generated tokens, in order. Tokens behind the one that completes a stop string are not used."""
        if not self._watches:
            self.num_tokens += len(ids)
            return TextStep._make((self._detokenizer.push(ids), None, len(ids)))
        shown: list[str] = []
        for num_used, token_id in enumerate(ids, start=1):
            self.num_tokens += 1
            armed = self.num_tokens >= self._min_tokens
            step = self._matcher.push(self._detokenizer.push((token_id,)), armed=armed)
            shown.append(step.text)
            if step.matched is not None:
                return TextStep("".join(shown), step.matched, num_used)
        return TextStep("".join(shown), None, len(ids))

    def finish(self) -> TextStep:
        """No more tokens: the rest of the text. A stop string completed only by it (U+FFFD) still ends the text."""
        step = self._matcher.push(self._detokenizer.flush(), armed=self.num_tokens >= self._min_tokens)
        rest = "" if step.matched is not None else self._matcher.flush()
        return TextStep(step.text + rest, step.matched, 0)
