"""What each token adds to a text, as bytes: the arithmetic under detokenization and logprob reports.

Knows the two families of vocabularies that generate text, byte-level BPE and SentencePiece with byte fallback, by the
decoder that tokenizer.json declares. A decoder it does not understand is an error on first use, never a guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedDecoder(Exception):
    """tokenizer.json declares a decoder whose tokens have no bytes of their own."""


def byte_level_alphabet() -> dict[str, int]:
    """The map of GPT-2: a printable character for each byte. Bytes that print stand for themselves, others from
    U+0100.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_ALPHABET = byte_level_alphabet()


@dataclass(frozen=True)
class _Rules:
    """The declared decoder, reduced to what it does to a token and to the start of a text."""

    byte_level: bool
    replacements: tuple[tuple[str, str], ...]
    byte_fallback: bool
    start_blanks: int
    """Blanks dropped from the start of the whole text."""
    first_token_blank: str | None
    """A character dropped wherever it stands in the first token (the Metaspace decoder)."""


class TokenBytes(dict[int, bytes]):
    """`table[id]` is the bytes of a token in the middle of a text. Filled as ids are asked for; ids without a token
    are b"".
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self._backend = backend
        self._rules = _read_rules(backend)

    def __missing__(self, token_id: int) -> bytes:
        known = self[token_id] = self._compute(token_id, is_first=False)
        return known

    def first(self, token_id: int) -> bytes:
        """The bytes of a token that opens a text, before `start_blanks` are dropped."""
        return self._compute(token_id, is_first=True)

    @property
    def start_blanks(self) -> int:
        """How many blanks are dropped from the start of a whole text."""
        return 0 if self._rules is None else self._rules.start_blanks

    @property
    def strips_start(self) -> bool:
        """Whether the start of a whole text differs from its middle."""
        rules = self._rules
        return rules is not None and (rules.start_blanks > 0 or rules.first_token_blank is not None)

    def join(self, ids: Sequence[int]) -> bytes:
        """The bytes of a whole text."""
        if not ids:
            return b""
        data = b"".join([self.first(ids[0]), *(self[token_id] for token_id in ids[1:])])
        num_blanks = len(data) - len(data.lstrip(b" "))
        return data[min(num_blanks, self.start_blanks) :]

    def _compute(self, token_id: int, *, is_first: bool) -> bytes:
        rules = self._rules
        token: str | None = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if rules is None:
            raise UnsupportedDecoder(
                "tokenizer.json: its decoder is neither byte-level nor SentencePiece's, so generated text cannot be "
                f"put together from token {token!r}; use a tokenizer.json with one of the two"
            )
        if rules.byte_level:
            values = [_ALPHABET.get(char) for char in token]
            plain = [value for value in values if value is not None]
            return bytes(plain) if len(plain) == len(values) else token.encode()
        if is_first and rules.first_token_blank is not None:
            token = token.replace(rules.first_token_blank, "")
        for old, new in rules.replacements:
            token = token.replace(old, new)
        if rules.byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match.group(1), 16)])
        return token.encode()


def _read_rules(backend: Backend) -> _Rules | None:
    """The rules of the declared decoder, or None for one that is not understood."""
    declared: dict[str, Any] | None = json.loads(backend.decoder.__getstate__()) if backend.decoder else None
    if declared is None:
        return None
    steps = declared["decoders"] if declared["type"] == "Sequence" else [declared]
    replacements: list[tuple[str, str]] = []
    byte_level = byte_fallback = fused = False
    start_blanks, first_blank = 0, None
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                byte_level = True
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "ByteFallback"}:
                byte_fallback = True
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0} if fused:
                start_blanks = start
            case {"type": "Metaspace", "replacement": str(mark)}:
                replacements.append((mark, " "))
                first_blank = None if step.get("prepend_scheme") == "never" else mark
            case _:
                return None
    if byte_level and len(steps) > 1:
        return None
    return _Rules(byte_level, tuple(replacements), byte_fallback, start_blanks, first_blank)
