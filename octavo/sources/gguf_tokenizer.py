"""Builds tokenizer.json and tokenizer_config.json from a GGUF file's metadata.

Two kinds of vocabulary: byte-level BPE ("gpt2"), split as `tokenizer.ggml.pre` says, and SentencePiece
("llama") with byte fallback. It knows ggml's conventions and the `tokenizers` library, no models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.sources.gguf_header import GgufError, GgufHeader

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE_MARK = "\u2581"


@dataclass(frozen=True)
class _Splitting:
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

_GPT2 = _Splitting()
_DIGITS_APART = _Splitting(isolates_digits=True)
_LLAMA3 = _Splitting(
    rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SYMBOLS_AND_SPACES}", takes_whole_words=True, adds_bos=True
)
_QWEN2 = _Splitting(rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SYMBOLS_AND_SPACES}", composes_unicode=True)
_TEKKEN = _Splitting(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    takes_whole_words=True,
    adds_bos=True,
)

_SPLITTINGS: Mapping[str, _Splitting] = {
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
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}


@dataclass(frozen=True)
class _Vocabulary:
    """The token table and the ids with a role. `kinds` are ggml's token types, one per token."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    role_ids: Mapping[str, int]
    adds_bos: bool
    adds_eos: bool

    @property
    def ids(self) -> dict[str, int]:
        return {token: token_id for token_id, token in enumerate(self.tokens)}

    def role_token(self, role: str) -> str | None:
        token_id = self.role_ids.get(role)
        return None if token_id is None else self.tokens[token_id]


def tokenizer_json(header: GgufHeader) -> str:
    """The contents of tokenizer.json. Raises `GgufError` for a kind or splitting not supported."""
    kind = header.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(header)
    elif kind == "llama":
        tokenizer = _sentencepiece(header)
    else:
        raise GgufError(header.path, f"tokenizer.ggml.model is {kind!r}; supported: gpt2, llama")
    vocabulary = _vocabulary(header)
    _add_whole_tokens(tokenizer, vocabulary)
    _add_border_tokens(tokenizer, vocabulary)
    return tokenizer.to_str()


def tokenizer_config(header: GgufHeader) -> dict[str, object]:
    """The contents of tokenizer_config.json, chat template included."""
    vocabulary = _vocabulary(header)
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": vocabulary.adds_eos,
        "model_max_length": header.integer(f"{header.architecture}.context_length"),
    }
    for role in ("bos", "eos", "unk", "pad"):
        config[f"{role}_token"] = vocabulary.role_token(role)
    if "tokenizer.chat_template" in header.metadata:
        config["chat_template"] = header.text("tokenizer.chat_template")
    return config


def _vocabulary(header: GgufHeader) -> _Vocabulary:
    tokens = header.texts("tokenizer.ggml.tokens")
    kinds = header.metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise GgufError(header.path, f"tokenizer.ggml.token_type has not one entry for each of {len(tokens)}")
    is_sentencepiece = header.text("tokenizer.ggml.model") == "llama"
    adds_bos = is_sentencepiece or _splitting(header).adds_bos
    return _Vocabulary(
        tokens=tokens,
        kinds=kinds,
        role_ids=_role_ids(header, len(tokens), {"bos": 1, "eos": 2, "unk": 0} if is_sentencepiece else {}),
        adds_bos=header.flag("tokenizer.ggml.add_bos_token", adds_bos),
        adds_eos=header.flag("tokenizer.ggml.add_eos_token", False),
    )


def _role_ids(header: GgufHeader, num_tokens: int, defaults: Mapping[str, int]) -> dict[str, int]:
    keys = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    role_ids = {}
    for role, key in keys.items():
        field = f"tokenizer.ggml.{key}"
        if field not in header.metadata and role not in defaults:
            continue
        role_ids[role] = header.integer(field, defaults.get(role))
        if not 0 <= role_ids[role] < num_tokens:
            raise GgufError(header.path, f"{field} is {role_ids[role]}, the vocabulary has {num_tokens} tokens")
    return role_ids


def _splitting(header: GgufHeader) -> _Splitting:
    name = header.metadata.get("tokenizer.ggml.pre", "default")
    splitting = _SPLITTINGS.get(name) if isinstance(name, str) else None
    if splitting is None:
        raise GgufError(header.path, f"tokenizer.ggml.pre is {name!r}; supported: {', '.join(sorted(_SPLITTINGS))}")
    return splitting


def _byte_level(header: GgufHeader) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    splitting = _splitting(header)
    ids = _vocabulary(header).ids
    merges = [_merge_pair(header, merge) for merge in header.texts("tokenizer.ggml.merges")]
    _require_known(header, merges, ids)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=splitting.takes_whole_words))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.isolates_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if splitting.composes_unicode:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(header: GgufHeader) -> "Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = _vocabulary(header)
    if "tokenizer.ggml.merges" in header.metadata:
        merges = [_merge_pair(header, merge) for merge in header.texts("tokenizer.ggml.merges")]
    else:
        merges = _merges_by_score(header, vocabulary)
    _require_known(header, merges, vocabulary.ids)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=merges,
            unk_token=vocabulary.role_token("unk"),
            fuse_unk=True,
            byte_fallback=_BYTE in vocabulary.kinds,
        )
    )
    adds_space = header.flag("tokenizer.ggml.add_space_prefix", True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement=_SPACE_MARK, prepend_scheme="first" if adds_space else "never", split=False
    )
    steps: list[decoders.Decoder] = [
        decoders.Replace(_SPACE_MARK, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if adds_space:
        steps.append(decoders.Strip(content=" ", left=1, right=0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _merges_by_score(header: GgufHeader, vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best score first.

    SentencePiece keeps scores instead of merges: the pair whose union scores highest is joined first.
    Control and byte tokens are never made by joining.
    """
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(vocabulary.tokens):
        raise GgufError(header.path, "tokenizer.ggml has neither merges nor one score for each token")
    joinable = {
        token: token_id
        for token_id, token in enumerate(vocabulary.tokens)
        if vocabulary.kinds[token_id] in (_NORMAL, _USER_DEFINED)
    }
    ranked = []
    for token, token_id in joinable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in joinable and right in joinable:
                order = (-scores[token_id], -len(left), -len(right), token_id)
                ranked.append((order, (left, right)))
    return [pair for _, pair in sorted(ranked)]


def _merge_pair(header: GgufHeader, merge: str) -> tuple[str, str]:
    # A part may itself begin with a space, so the separator is looked for after the first character.
    cut = merge.find(" ", 1)
    if cut < 0:
        raise GgufError(header.path, f"tokenizer.ggml.merges holds {merge!r}, which is not two parts")
    return merge[:cut], merge[cut + 1 :]


def _require_known(header: GgufHeader, merges: Sequence[tuple[str, str]], ids: Mapping[str, int]) -> None:
    for left, right in merges:
        if left not in ids or right not in ids or left + right not in ids:
            raise GgufError(header.path, f"merge {left!r} {right!r} names tokens not in the vocabulary")


def _add_whole_tokens(tokenizer: "Tokenizer", vocabulary: _Vocabulary) -> None:
    """Tokens matched in the text as they are, never cut: control tokens and those a user defined."""
    from tokenizers import AddedToken

    control_ids = {i for i, kind in enumerate(vocabulary.kinds) if kind in (_CONTROL, _UNKNOWN)}
    # Files without token types still say what begins and ends a text. Padding is left out: some files
    # name an ordinary word there, which must stay one.
    control_ids |= {vocabulary.role_ids[role] for role in ("bos", "eos") if role in vocabulary.role_ids}
    tokenizer.add_special_tokens(
        [AddedToken(vocabulary.tokens[i], normalized=False, special=True) for i in sorted(control_ids)]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token_id, token in enumerate(vocabulary.tokens)
            if vocabulary.kinds[token_id] == _USER_DEFINED and token_id not in control_ids
        ]
    )


def _add_border_tokens(tokenizer: "Tokenizer", vocabulary: _Vocabulary) -> None:
    """Put BOS before and EOS after what is encoded, where the file asks for it."""
    from tokenizers import processors

    before = [vocabulary.role_token("bos")] if vocabulary.adds_bos else []
    after = [vocabulary.role_token("eos")] if vocabulary.adds_eos else []
    borders = [token for token in (*before, *after) if token is not None]
    if not borders:
        return
    first, second = [*before, "$A", *after], [*before, "$A", *after, *before, "$B:1", *after]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[part for part in first if part is not None],
        pair=[part for part in second if part is not None],
        special_tokens=[(token, vocabulary.ids[token]) for token in borders],
    )
