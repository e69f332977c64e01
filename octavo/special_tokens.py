"""Which tokens of a vocabulary are special, whatever tokenizer.json alone says.

Knows tokenizer.json through the `tokenizers` library, tokenizer_config.json and special_tokens_map.json as read. A
router hides special tokens and keeps text from forging them; a worker keeps grammars from spelling them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Tokenizer

NAMED_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def named_special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens; a later source wins. An entry is a string or an object with `content`."""
    found: dict[str, str] = {}
    for source in sources:
        for name in NAMED_SPECIAL_TOKENS:
            value = source.get(name)
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[name] = content
    return found


def flag_special_tokens(backend: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Tokens that the configuration calls special are special, whatever tokenizer.json says, as in transformers.

    Only tokens of the vocabulary: a name without an id would get one that the model has no row for. (BOS and EOS around
    a text are the business of tokenizer.json's post-processor alone; `add_bos_token` beside it has no effect.)
    """
    extra = [item for key in ("additional_special_tokens", "extra_special_tokens") for item in config.get(key) or []]
    contents = [*named.values(), *(item for item in extra if isinstance(item, str))]
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    missing = [c for c in dict.fromkeys(contents) if c not in special and backend.token_to_id(c) is not None]
    backend.add_special_tokens([AddedToken(content, special=True, normalized=False) for content in missing])


def is_control_shaped(token: str) -> bool:
    """`<|…|>`: a control token even where a vocabulary does not flag it."""
    return token.startswith("<|") and token.endswith("|>")
