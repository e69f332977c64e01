"""Incremental detokenization against decoding everything at once, over real and random ids and any chunking."""

import itertools

import pytest
from conftest import TextModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_models import CORPUS
from tokenizers import Tokenizer as Backend
from tokenizers import decoders

from octavo.token_bytes import UnsupportedDecoder
from router.text.detokenize import Detokenizer, OutputText
from router.text.stop import StopMatcher
from router.text.tokenizer import Tokenizer

relaxed = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
TEXTS = [*CORPUS[:5], "🌶👩‍🚀 a  b\n\n", " lead", "中文字符 é ﬁ"]


def make(model: TextModel, prompt_ids: list[int], *, skip: bool = True) -> Detokenizer:
    tokenizer = model.tokenizer
    return Detokenizer(tokenizer.bytes_table, prompt_ids, tokenizer.special_ids if skip else frozenset())


def feed(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    deltas = [detokenizer.push(ids[a:b]) for a, b in itertools.pairwise(edges)]
    return [*deltas, detokenizer.flush()]


@relaxed
@given(data=st.data())
def test_deltas_join_to_the_library_decode_minus_the_prompt(text_model: TextModel, data: st.DataObject) -> None:
    tokenizer = text_model.tokenizer
    prompt_ids = tokenizer.encode(data.draw(st.sampled_from(["", *TEXTS])), add_special_tokens=data.draw(st.booleans()))
    ids = tokenizer.encode(data.draw(st.sampled_from(TEXTS)), add_special_tokens=False)
    deltas = feed(make(text_model, prompt_ids), ids, data.draw(st.lists(st.integers(0, 999), max_size=9)))
    whole = tokenizer.backend.decode(prompt_ids + ids, skip_special_tokens=True)
    before = tokenizer.backend.decode(prompt_ids, skip_special_tokens=True)
    assert "".join(deltas) == whole[len(before) :]


@relaxed
@given(data=st.data())
def test_any_ids_join_to_the_decode_of_their_bytes(text_model: TextModel, data: st.DataObject) -> None:
    """Random ids, undecodable bytes included: the twin joins all bytes first and decodes them once."""
    tokenizer = text_model.tokenizer
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=30))
    skip = data.draw(st.booleans())
    one_by_one = data.draw(st.booleans())
    cuts = list(range(len(ids))) if one_by_one else data.draw(st.lists(st.integers(0, 999), max_size=9))
    deltas = feed(make(text_model, [], skip=skip), ids, cuts)
    assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_byte_level_decode_equals_the_library_on_any_ids(text_models: dict[str, TextModel]) -> None:
    tokenizer = text_models["llama3"].tokenizer
    for start in range(tokenizer.vocab_size - 8):
        ids = [*range(start, start + 8), *range(start + 3, start - 1, -1)]
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("name", ["smollm", "qwen", "default", "mistral", "gemma"])
def test_prompt_that_ends_inside_a_character(text_models: dict[str, TextModel], name: str) -> None:
    model = text_models[name]
    ids = model.tokenizer.encode("SECRET-PREFIX \U0001fae8", add_special_tokens=False)
    prompt, last = ids[:-1], ids[-1]
    assert model.tokenizer.decode(prompt).endswith("\ufffd")
    tail = model.tokenizer.encode(" and more", add_special_tokens=False)
    completed = "".join(feed(make(model, prompt), [last, *tail], [1]))
    assert completed.startswith("\U0001fae8")
    assert "SECRET" not in completed
    abandoned = "".join(feed(make(model, prompt), tail, [1]))
    assert abandoned.strip() == "and more"
    assert make(model, prompt).flush() == ""


def ids_of(model: TextModel, *tokens: str) -> list[int]:
    ids = [model.tokenizer.token_id(token) for token in tokens]
    assert None not in ids
    return [token_id for token_id in ids if token_id is not None]


def test_leading_blank_is_dropped_at_the_start_of_the_whole_sequence_only(text_models: dict[str, TextModel]) -> None:
    for name in ("mistral", "legacy_llama"):
        model = text_models[name]
        blank = ids_of(model, "▁", "▁", "t")
        assert "".join(feed(make(model, []), blank, [1, 2])) == " t"
        assert "".join(feed(make(model, ids_of(model, "<s>")), blank, [1, 2])) == " t"
        assert "".join(feed(make(model, ids_of(model, "<s>", "t")), blank, [1, 2])) == "  t"
        assert "".join(feed(make(model, ids_of(model, "▁")), blank, [1, 2])) == "  t"
    bpe = text_models["smollm"]
    assert "".join(feed(make(bpe, []), ids_of(bpe, "Ġ", "Ġ", "t"), [1, 2])) == "  t"


def test_undecodable_bytes_wait_for_the_next_token(text_models: dict[str, TextModel]) -> None:
    model = text_models["mistral"]
    detokenizer = make(model, ids_of(model, "t"))
    parts = [
        detokenizer.push(ids_of(model, token)) for token in ("<0xF0>", "<0x9F>", "<0x8C>", "<0xB6>", "<0xF0>", "t")
    ]
    assert parts == ["", "", "", "🌶", "", "\ufffdt"]
    detokenizer.push(ids_of(model, "<0xF0>"))
    assert detokenizer.flush() == "\ufffd"


def test_token_bytes_rebuild_the_text(text_model: TextModel) -> None:
    tokenizer = text_model.tokenizer
    text = "one emoji 👩‍🚀 é"
    ids = tokenizer.encode("x", add_special_tokens=False) + tokenizer.encode(text, add_special_tokens=False)
    joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
    assert joined.decode().replace(" ", "").endswith(text.replace(" ", ""))
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""
    assert tokenizer.token_bytes(-1) == b""


def test_special_tokens_show_when_asked(text_models: dict[str, TextModel]) -> None:
    model = text_models["smollm"]
    ids = ids_of(model, "t", "<|im_end|>")
    assert make(model, []).push(ids) == "t"
    assert make(model, [], skip=False).push(ids) == "t<|im_end|>"


def test_output_text_stops_at_the_token_that_completes_the_string(text_models: dict[str, TextModel]) -> None:
    model = text_models["smollm"]
    ids = ids_of(model, "t", "h", "e", "t", "h", "e")
    output = OutputText(make(model, []), StopMatcher(("he",)))
    step = output.push(ids)
    assert (step.text, step.stop, step.num_tokens, output.num_tokens) == ("t", "he", 3, 3)


def test_stop_string_before_min_tokens_is_ignored(text_models: dict[str, TextModel]) -> None:
    model = text_models["smollm"]
    ids = ids_of(model, "t", "h", "e", "t", "h", "e", "t")
    for min_tokens, shown in ((3, "t"), (4, "thet"), (6, "thet"), (7, "thethet")):
        for batch in ([ids], [[i] for i in ids]):
            output = OutputText(make(model, []), StopMatcher(("he",)), min_tokens)
            text = ""
            for part in batch:
                step = output.push(part)
                text += step.text
                if step.stop is not None:
                    break
            else:
                text += output.finish().text
            assert text == shown


def test_a_decoder_without_bytes_is_refused(text_models: dict[str, TextModel]) -> None:
    backend = Backend.from_str(text_models["smollm"].tokenizer.backend.to_str())
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedDecoder, match="decoder"):
        Tokenizer(backend, {}, {}).decode([5])
