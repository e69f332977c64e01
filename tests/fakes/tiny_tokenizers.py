"""Tokenizers of a few hundred tokens that can encode any text: byte-level BPE, and BPE with byte fallback.

Both know every byte, end tokens and whatever pieces a test scripts; neither merges anything, so pieces are only ever
decoded. `tokenizers` does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

Style = Literal["byte_level", "byte_fallback"]

END_TOKEN = "<|end|>"


def tiny_tokenizer(
    pieces: Sequence[str | bytes], style: Style = "byte_level", specials: Sequence[str] = ()
) -> Tokenizer:
    """Ids: END_TOKEN 0, the other specials, the 256 bytes in order, the pieces in order.

    A piece of bytes need not be whole characters (byte_level only). Pieces of one byte are that byte's token and get no
    id of their own. Raises ValueError for a piece that appears twice.
    """
    names = [END_TOKEN, *specials]
    names += [_byte_token(value, style) for value in range(256)]
    names += [name for name in (piece_token(piece, style) for piece in pieces) if name not in names]
    if len({piece_token(piece, style) for piece in pieces}) != len(pieces):
        raise ValueError("a scripted piece appears twice; every step of a script needs a token of its own")
    vocab = {name: token_id for token_id, name in enumerate(names)}
    if style == "byte_level":
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token=END_TOKEN))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (END_TOKEN, *specials)])
    return tokenizer


def piece_token(piece: str | bytes, style: Style = "byte_level") -> str:
    """The vocabulary's name for a piece."""
    if style == "byte_fallback":
        if isinstance(piece, bytes):
            if len(piece) != 1:
                raise ValueError(f"{piece!r}: with byte fallback only single bytes are tokens")
            return _byte_token(piece[0], style)
        return piece.replace(" ", "▁")
    data = piece.encode() if isinstance(piece, str) else piece
    return "".join(_byte_token(value, style) for value in data)


def _byte_token(value: int, style: Style) -> str:
    return f"<0x{value:02X}>" if style == "byte_fallback" else _ALPHABET[value]


def _byte_level_alphabet() -> list[str]:
    """GPT-2's names of bytes: printable ones stand for themselves, the rest for code points from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [value for value in range(256) if value not in printable]
    return [chr(value) if value in printable else chr(256 + others.index(value)) for value in range(256)]


_ALPHABET = _byte_level_alphabet()
