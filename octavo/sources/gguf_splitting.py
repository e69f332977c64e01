"""How byte-level vocabularies cut text before merging, by the name a GGUF file gives it.

A table of patterns and flags; it builds nothing. Names are ggml's (`tokenizer.ggml.pre`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from octavo.sources.gguf_header import GgufError, GgufHeader


@dataclass(frozen=True)
class Splitting:
    """How one `tokenizer.ggml.pre` cuts text before merging.

    `pattern` None is GPT-2's own pattern, built into the byte-level step. `isolates_digits` cuts every
    digit off first. `takes_whole_words` uses a vocabulary entry for a word even where no merges lead to it.
    """

    pattern: str | None = None
    isolates_digits: bool = False
    takes_whole_words: bool = False
    composes_unicode: bool = False
    adds_bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SYMBOLS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"

_GPT2 = Splitting()
_DIGITS_APART = Splitting(isolates_digits=True)
_LLAMA3 = Splitting(
    rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}", takes_whole_words=True, adds_bos=True
)
# Phi-4's.
_CL100K = Splitting(_LLAMA3.pattern)
# Phi-4-mini's.
_O200K = Splitting(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = Splitting(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS_AND_SPACES}", composes_unicode=True)
_TEKKEN = Splitting(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    takes_whole_words=True,
    adds_bos=True,
)

_SPLITTINGS: Mapping[str, Splitting] = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS_APART,
    "starcoder": _DIGITS_APART,
    "refact": _DIGITS_APART,
    "codeshell": _DIGITS_APART,
    "exaone": _DIGITS_APART,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama-bpe": _LLAMA3,
    "dbrx": _CL100K,
    "gpt-4o": _O200K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


def splitting_of(header: GgufHeader) -> Splitting:
    """The file's splitting. Raises `GgufError` for a name not in the table."""
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    splitting = _SPLITTINGS.get(name) if isinstance(name, str) else None
    if splitting is None:
        raise GgufError(header.path, f"tokenizer.ggml.pre is {name!r}; supported: {', '.join(sorted(_SPLITTINGS))}")
    return splitting
