"""Builds tokenizer.json and tokenizer_config.json from a GGUF file's metadata.

Two kinds of vocabulary: byte-level BPE ("gpt2"), split as `tokenizer.ggml.pre` says, and SentencePiece
("llama") with byte fallback. It knows ggml's conventions and the `tokenizers` library, no models.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.sources.gguf_header import GgufError, GgufHeader
from octavo.sources.gguf_splitting import splitting_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE_MARK = "\u2581"


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
    _add_whole_tokens(tokenizer, vocabulary, _taking_spaces(header))
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
    if (template := _chat_template(header)) is not None:
        config["chat_template"] = template
    return config


def _chat_template(header: GgufHeader) -> str | list[dict[str, str]] | None:
    """The file's template, or its named ones as a list where it has several."""
    field = "tokenizer.chat_template"
    named = {"default": header.text(field)} if field in header.metadata else {}
    if f"{field}s" in header.metadata:
        named |= {name: header.text(f"{field}.{name}") for name in header.texts(f"{field}s")}
    if not named:
        return None
    if named.keys() == {"default"}:
        return named["default"]
    return [{"name": name, "template": template} for name, template in named.items()]


def _vocabulary(header: GgufHeader) -> _Vocabulary:
    tokens = header.texts("tokenizer.ggml.tokens")
    kinds = header.metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise GgufError(header.path, f"tokenizer.ggml.token_type has not one entry for each of {len(tokens)}")
    is_sentencepiece = header.text("tokenizer.ggml.model") == "llama"
    adds_bos = is_sentencepiece or splitting_of(header).adds_bos
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


def _byte_level(header: GgufHeader) -> "Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    splitting = splitting_of(header)
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


def _taking_spaces(header: GgufHeader) -> Callable[[str], bool]:
    """Which whole tokens swallow the white space after them: Phi-3's own, those it took from Llama aside.

    GGUF has no field for it.
    """
    if header.architecture == "phi3" and header.text("tokenizer.ggml.model") == "llama":
        return lambda token: token not in ("<unk>", "<s>", "<|endoftext|>")
    return lambda token: False


def _add_whole_tokens(tokenizer: "Tokenizer", vocabulary: _Vocabulary, takes_spaces: Callable[[str], bool]) -> None:
    """Tokens matched in the text as they are, never cut: control tokens and those a user defined."""
    from tokenizers import AddedToken

    control_ids = {i for i, kind in enumerate(vocabulary.kinds) if kind in (_CONTROL, _UNKNOWN)}
    # Files without token types still say what begins and ends a text. Padding is left out: some files
    # name an ordinary word there, which must stay one.
    control_ids |= {vocabulary.role_ids[role] for role in ("bos", "eos") if role in vocabulary.role_ids}
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True, rstrip=takes_spaces(token))
            for token in (vocabulary.tokens[i] for i in sorted(control_ids))
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=False, rstrip=takes_spaces(token))
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
