"""Tokens without an answer: what a model's tokenizer makes of a prompt, and of ids. Pure; runs in a thread."""

from __future__ import annotations

from dataclasses import dataclass

from router.errors import InvalidRequest, show_value
from router.prompting import build_prompts
from router.requests import ChatPrompt, CompletionPrompt, GenerationRequest
from router.sampling_rules import check_token_id
from router.text.model_text import ModelText

MAX_DETOKENIZED_IDS = 2**20


@dataclass(frozen=True)
class Tokenized:
    """The ids of a prompt, and each token's own text (U+FFFD where it is no whole character)."""

    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]
    max_model_len: int


def tokenize(prompt: CompletionPrompt | ChatPrompt, text: ModelText, vocab_size: int, max_model_len: int) -> Tokenized:
    """The ids that a generation request with this prompt would run. Raises `InvalidRequest`."""
    if isinstance(prompt, CompletionPrompt) and prompt.value == "":
        ids = tuple(text.tokenizer.encode("", add_special_tokens=prompt.add_special_tokens))
    else:
        (built,) = build_prompts(GenerationRequest(prompt), text, vocab_size=vocab_size, max_model_len=max_model_len)
        ids = built.prompt.token_ids
    texts = tuple(text.tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids)
    return Tokenized(ids, texts, max_model_len)


def detokenize(ids: object, text: ModelText, vocab_size: int, *, skip_special_tokens: bool) -> str:
    """The text of ids. Raises `InvalidRequest` naming the index of a bad one."""
    if not isinstance(ids, (list, tuple)):
        raise InvalidRequest("tokens", f"tokens must be a list of token ids, got {show_value(ids)}")
    if len(ids) > MAX_DETOKENIZED_IDS:
        raise InvalidRequest("tokens", f"tokens must hold at most {MAX_DETOKENIZED_IDS} ids, got {len(ids)}")
    checked = [check_token_id(f"tokens[{index}]", token_id, vocab_size) for index, token_id in enumerate(ids)]
    return text.tokenizer.decode(checked, skip_special_tokens=skip_special_tokens)
