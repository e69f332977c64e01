"""Text to token ids and back to bytes, for one model directory in Hugging Face format.

Knows tokenizer.json, tokenizer_config.json and special_tokens_map.json, read once by `Tokenizer.load`; after that it
is pure and safe to call from several threads. Must not know requests, chat roles or templates, and must not import
torch or transformers: ids equal transformers' because both drive the same `tokenizers` library, set up the same way.

`PlainTextEncoder` is the border that keeps a user's text from forging control tokens; see its docstring.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.special_tokens import flag_special_tokens, is_control_shaped, named_special_tokens
from octavo.token_bytes import TokenBytes


class TokenizerError(Exception):
    """The model directory holds no tokenizer that can be used; the message names the file and what to do."""


@dataclass(frozen=True)
class Span:
    """Characters `start` to `end` (exclusive) of a text hold the control string `content`."""

    start: int
    end: int
    content: str


class Tokenizer:
    """One loaded tokenizer. Build it with `Tokenizer.load`."""

    def __init__(self, backend: Backend, config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> None:
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self.config = config
        """tokenizer_config.json as read (empty when there is none)."""
        self.special_tokens = special_tokens
        """`bos_token`, `eos_token` … to their text, as chat templates see them."""
        flag_special_tokens(backend, config, special_tokens)
        self.added_tokens: Mapping[int, AddedToken] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self.added_tokens.items() if token.special)
        self._bytes = TokenBytes(backend)

    @classmethod
    def load(cls, directory: str | Path) -> Tokenizer:
        """Read the tokenizer of a model directory. Raises `TokenizerError` naming a missing or broken file."""
        root = Path(directory)
        path = root / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} is missing: a model directory needs a tokenizer.json")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of damage
            raise TokenizerError(f"{path} ({path.stat().st_size} bytes) cannot be read: {error}") from error
        config = read_json_object(root / "tokenizer_config.json")
        special_map = read_json_object(root / "special_tokens_map.json")
        return cls(backend, config, named_special_tokens(special_map, config))

    @property
    def backend(self) -> Backend:
        """The `tokenizers` object itself, to be read and never changed."""
        return self._backend

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id the tokenizer can make (the model may have more rows: padding)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def longest_token_chars(self) -> int:
        """Characters of the longest token: no text of more than N times this many fits into N tokens."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @cached_property
    def plain(self) -> PlainTextEncoder:
        """The encoder for which no special token can be written as text."""
        return PlainTextEncoder(self, control_strings(self, ""))

    def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool = True) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds BOS and the like where the tokenizer does; a text that already begins with BOS gets no
        second one. Without `allow_special`, control strings in the text are encoded as ordinary text.
        """
        if allow_special:
            ids = encode_ids(self._backend, text, add_special_tokens=add_special_tokens)
        else:
            ids = self.plain.encode(text)
            if add_special_tokens:
                ids = self.enclose(ids)
        doubled = ids[:2] == [self.bos_id, self.bos_id]
        return ids[1:] if doubled and add_special_tokens and allow_special else ids

    def enclose(self, ids: list[int]) -> list[int]:
        """Ids with BOS and the like around them, as far as the tokenizer adds such; none is doubled."""
        prefix, suffix = self._added_ids
        before = [] if ids[: len(prefix)] == prefix else prefix
        after = [] if suffix and ids[-len(suffix) :] == suffix else suffix
        return [*before, *ids, *after]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of a whole sequence: the joined bytes of its tokens, undecodable ones as U+FFFD.

        Equals the library's own decode wherever the bytes are valid UTF-8.
        """
        hidden = self.special_ids if skip_special_tokens else frozenset()
        return self._bytes.join([i for i in ids if i not in hidden]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, as it adds them in the middle of a text. Empty for an id with no token."""
        return self._bytes[token_id]

    @property
    def bytes_table(self) -> TokenBytes:
        """Bytes of every token and the rule for the start of a text, for the detokenizer."""
        return self._bytes

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact vocabulary entry, or None."""
        result: int | None = self._backend.token_to_id(token)
        return result

    def special_token_id(self, token: str) -> int | None:
        """The id of a special token by its text, or None."""
        found = self.token_id(token)
        return found if found in self.special_ids else None

    def _special_id(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        return None if content is None else self.token_id(content)

    @cached_property
    def _added_ids(self) -> tuple[list[int], list[int]]:
        """Ids that the post-processor puts before and after a text."""
        bare = self._backend.encode("a", add_special_tokens=False).ids
        full = self._backend.encode("a", add_special_tokens=True).ids
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start], full[start + len(bare) :]
        raise TokenizerError("tokenizer.json: its post-processor changes the ids of the text itself")


class PlainTextEncoder:
    """Encodes text in which only *named* spans are control tokens, whatever else the text spells.

    A second backend shares the model, normalizer and pre-tokenizer of the first, but knows each control token under a
    marker of 128 random bits instead of its text. The spans that really are control tokens are replaced by their
    marker, the whole text is encoded in one pass, and the markers' ids are mapped back. So everything that looks at
    positions or neighbours (a blank put before the first word, stripping around a token) acts exactly as it does in
    the first backend, and a control string outside the spans is ordinary text. Markers are ASCII letters: no
    normalizer touches them; they never leave this object.
    """

    def __init__(self, tokenizer: Tokenizer, controls: frozenset[str]) -> None:
        """`controls`: the added tokens (by their text) that count as control tokens. Other added tokens match as
        ever.
        """
        self._tokenizer = tokenizer
        backend = tokenizer.backend
        self._backend = Backend(backend.model)
        if backend.normalizer is not None:
            self._backend.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._backend.pre_tokenizer = backend.pre_tokenizer
        self._marker: dict[str, str] = {}
        self._real_id: dict[int, int] = {}
        spelled = (backend.model.token_to_id(content) for content in controls)
        self._forbidden_ids = frozenset(token_id for token_id in spelled if token_id is not None)
        """Control tokens that are also ordinary pieces of the vocabulary, by the id that both backends give them."""
        self._add_tokens(controls)

    def _add_tokens(self, controls: frozenset[str]) -> None:
        """Register every added token of the first backend, the control tokens under their markers."""
        secret = "".join(chr(ord("a") + int(digit, 16)) for digit in secrets.token_hex(16))
        twins: dict[int, AddedToken] = {}
        for real_id, token in sorted(self._tokenizer.added_tokens.items()):
            if token.content in controls:
                self._marker[token.content] = f"{secret}{_letters(real_id)}"
            twins[real_id] = AddedToken(
                self._marker.get(token.content, token.content),
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
        self._backend.add_tokens(list(twins.values()))  # one call: each builds the library's automaton anew
        for real_id, twin in twins.items():
            twin_id = self._backend.token_to_id(twin.content)
            if twin_id is None:
                raise TokenizerError(f"tokenizer.json: added token {real_id} cannot be registered a second time")
            self._real_id[twin_id] = real_id

    def encode(self, text: str, spans: Iterable[Span] = ()) -> list[int]:
        """Ids of `text` with control tokens at `spans` (in order, not overlapping) and nowhere else."""
        pieces: list[str] = []
        position = 0
        for span in spans:
            pieces += (text[position : span.start], self._marker[span.content])
            position = span.end
        pieces.append(text[position:])
        ids: list[int] = []
        for raw_id in encode_ids(self._backend, "".join(pieces), add_special_tokens=False):
            if raw_id in self._forbidden_ids:
                # The vocabulary spells a control token as an ordinary piece: take it apart.
                ids += self._spell_out(raw_id)
            else:
                ids.append(self._real_id.get(raw_id, raw_id))
        return ids

    def _spell_out(self, token_id: int) -> list[int]:
        """The ids of a token's characters one by one, which together are the same text and no control token."""
        backend = self._tokenizer.backend
        token = backend.id_to_token(token_id) or ""
        return [piece.id for char in token for piece in backend.model.tokenize(char)]


def encode_ids(backend: Backend, text: str, *, add_special_tokens: bool) -> list[int]:
    """The ids of one text. As a batch of one: only there does the library let other threads run meanwhile."""
    ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def control_strings(tokenizer: Tokenizer, template_text: str) -> frozenset[str]:
    """The added tokens that user text must not be able to write.

    Every special token; tokens shaped `<|…|>`, which some vocabularies do not flag; and those that the chat template
    itself writes (`template_text`: its literals), such as `<tool_call>`. An added token of blanks alone forges nothing,
    and other added tokens are words of the vocabulary: both stay what they are.
    """

    def is_control(token: AddedToken) -> bool:
        text = token.content
        return bool(token.special or (text.strip() and (is_control_shaped(text) or text in template_text)))

    return frozenset(token.content for token in tokenizer.added_tokens.values() if is_control(token))


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} when the file is absent. Raises `TokenizerError` naming file and line."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise TokenizerError(f"{path} ({path.stat().st_size} bytes) is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} must hold a JSON object, found {type(value).__name__}")
    return value


def _letters(number: int) -> str:
    """A number as letters a–p, ended by `z` so that no marker is the prefix of another."""
    return "".join(chr(ord("a") + int(digit, 16)) for digit in f"{number:x}") + "z"
