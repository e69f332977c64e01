"""Writes small GGUF files with chosen metadata, for tests of what is read from them."""

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
CONTEXT_TOKENS = 128


def start_llama(path: Path, num_tokens: int, arch: str = "llama") -> gguf.GGUFWriter:
    """A writer with the model's fields and one embedding matrix; add a tokenizer, then `finish`.

    `arch` is the name of another family with the same fields.
    """
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(CONTEXT_TOKENS)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tensor("token_embd.weight", np.zeros((num_tokens, 32), dtype=np.float32))
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_byte_level_vocabulary(writer: gguf.GGUFWriter, pre: str, extra: Sequence[str] = ()) -> list[str]:
    """All 256 bytes, two merges, one control token and one user-defined one. Returns the tokens."""
    tokens = [*byte_alphabet(), "Ġt", "Ġth", *extra, "<|end of text|>", "<think>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([NORMAL] * (len(tokens) - 2) + [CONTROL, USER_DEFINED])
    writer.add_token_merges(["Ġ t", "Ġt h"])
    writer.add_eos_token_id(len(tokens) - 2)
    return tokens


def add_sentencepiece_vocabulary(writer: gguf.GGUFWriter, adds_bos: bool | None = True) -> list[str]:
    """A vocabulary of pieces with scores and byte fallback, as SentencePiece would train it.

    `adds_bos` None: the file does not say.
    """
    pieces = ["▁", *"abcdehilnorstuwxyz.,!0123", "▁t", "th", "he", "▁the", "▁th", "in", "ing", "▁w", "or", "▁wor"]
    pieces += ["ld", "▁world", "ll", "hell", "▁hell", "▁hello", "lo", "▁▁", "é", "🙂"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if adds_bos is not None:
        writer.add_add_bos_token(adds_bos)
    return tokens


def byte_alphabet() -> list[str]:
    """GPT-2's spelling of each byte: printable ones as themselves, others moved past U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(moved)) for byte in range(256)]
