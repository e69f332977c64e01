"""A tokenizer converted from GGUF gives the ids that transformers gives."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from octavo.sources import ModelSource
from octavo.sources.gguf_header import GgufError, GgufHeader, read_gguf_header
from octavo.sources.gguf_tokenizer import tokenizer_config, tokenizer_json
from tests.sources import nasty_corpus, tiny_gguf


@pytest.fixture(scope="module")
def converted(smollm2: ModelSource) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2.directory / "tokenizer.json"))


@pytest.fixture(scope="module")
def from_gguf(smollm2: ModelSource) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(smollm2.weights.parent, gguf_file=smollm2.weights.name)


def test_smollm2_ids_equal_transformers(converted: Tokenizer, from_gguf: PreTrainedTokenizerBase) -> None:
    for text in nasty_corpus.ALL_BUT_DIGITS_APART:
        assert converted.encode(text).ids == from_gguf(text).input_ids, text


def test_smollm2_ids_equal_transformers_with_the_splitting_the_file_names(
    converted: Tokenizer, from_gguf: PreTrainedTokenizerBase
) -> None:
    """The file says `pre = smollm`: every digit apart, as in the model's published tokenizer.

    transformers ignores that field for this name and splits as GPT-2 does, so it is told here.
    """
    backend = Tokenizer.from_str(from_gguf.backend_tokenizer.to_str())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text in nasty_corpus.EVERYTHING:
        assert converted.encode(text).ids == backend.encode(text).ids, text
    assert converted.encode("\n\n7").tokens == ["ĊĊ", "7"]


def test_transformers_reads_the_converted_directory(smollm2: ModelSource, converted: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2.directory)
    for text in nasty_corpus.EVERYTHING:
        assert converted.encode(text).ids == theirs(text).input_ids, text
    assert (theirs.bos_token, theirs.eos_token, theirs.pad_token) == ("<|im_start|>", "<|im_end|>", "<|im_end|>")


def test_chat_template_renders_as_from_the_gguf(smollm2: ModelSource, from_gguf: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "Hi 🙂"}, {"role": "assistant", "content": "Hello"}]
    theirs = AutoTokenizer.from_pretrained(smollm2.directory)
    rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == from_gguf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert "<|im_start|>user\nHi 🙂<|im_end|>" in rendered


def test_every_text_survives_a_round_trip(converted: Tokenizer) -> None:
    for text in nasty_corpus.EVERYTHING:
        assert converted.decode(converted.encode(text).ids, skip_special_tokens=False) == text


def test_sentencepiece_ids_equal_transformers(tmp_path: Path) -> None:
    writer = tiny_gguf.start_llama(tmp_path / "spm.gguf", 300)
    tiny_gguf.add_sentencepiece_vocabulary(writer)
    tiny_gguf.finish(writer)
    ours = Tokenizer.from_str(tokenizer_json(read_gguf_header(tmp_path / "spm.gguf")))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="spm.gguf")
    for text in (*nasty_corpus.EVERYTHING, "hello the world", "the  world", "winging it, hell"):
        # Their file loader leaves BOS to a setting that it does not read here.
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False), text
    assert ours.encode("hello world").tokens == ["<s>", "▁hello", "▁world"]
    assert ours.encode("ü", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xBC>"]
    assert ours.decode(ours.encode("hello ü 🙂 world").ids) == "hello ü 🙂 world"


def test_no_space_is_put_before_where_the_file_says_so(tmp_path: Path) -> None:
    writer = tiny_gguf.start_llama(tmp_path / "spm.gguf", 300)
    tiny_gguf.add_sentencepiece_vocabulary(writer)
    writer.add_add_space_prefix(False)
    tiny_gguf.finish(writer)
    ours = Tokenizer.from_str(tokenizer_json(read_gguf_header(tmp_path / "spm.gguf")))
    assert ours.encode("the").tokens == ["<s>", "th", "e"]
    assert ours.decode(ours.encode(" the").ids) == " the"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("default", "x  123'S", ["x", "Ġ", "Ġ123", "'", "S"]),
        ("smollm", "x  123'S", ["x", "ĠĠ", "1", "2", "3", "'", "S"]),
        ("llama-bpe", "x  1234'S", ["x", "Ġ", "Ġ", "123", "4", "'S"]),
        ("qwen2", "x  123'S", ["x", "Ġ", "Ġ", "1", "2", "3", "'S"]),
        ("tekken", "helloWorld 12", ["hello", "World", "Ġ", "1", "2"]),
        ("dbrx", "x  1234'S", ["x", "Ġ", "Ġ", "123", "4", "'S"]),
        ("gpt-4o", "helloWorld's 1234", ["hello", "World's", "Ġ", "123", "4"]),
    ],
)
def test_text_is_split_as_the_file_says(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(_byte_level(tmp_path, pre)))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken"])
def test_patterns_equal_transformers(tmp_path: Path, pre: str) -> None:
    ours = Tokenizer.from_str(tokenizer_json(_byte_level(tmp_path, pre)))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=f"{pre}.gguf").backend_tokenizer
    for text in nasty_corpus.EVERYTHING:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenizer.pre_tokenize_str(text), text


def test_control_and_user_defined_tokens_stay_whole(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_json(_byte_level(tmp_path, "default")))
    assert tokenizer.encode("<think> the<|end of text|>").tokens == ["<think>", "Ġth", "e", "<|end of text|>"]
    assert tokenizer.decode(tokenizer.encode("<think>x<|end of text|>").ids) == "<think>x"


def test_a_word_of_the_vocabulary_needs_no_merges_where_the_splitting_says_so(tmp_path: Path) -> None:
    for pre, tokens in (("llama-bpe", ["cat"]), ("default", ["c", "a", "t"])):
        tokenizer = Tokenizer.from_str(tokenizer_json(_byte_level(tmp_path, pre, extra=("cat",))))
        assert tokenizer.encode("cat", add_special_tokens=False).tokens == tokens


def test_an_ordinary_word_named_as_padding_stays_ordinary(tmp_path: Path) -> None:
    writer = tiny_gguf.start_llama(tmp_path / "pad.gguf", 300)
    tokens = tiny_gguf.add_byte_level_vocabulary(writer, "default")
    writer.add_pad_token_id(tokens.index("!"))
    tiny_gguf.finish(writer)
    header = read_gguf_header(tmp_path / "pad.gguf")
    tokenizer = Tokenizer.from_str(tokenizer_json(header))
    assert tokenizer.decode(tokenizer.encode("stop!").ids) == "stop!"
    assert tokenizer_config(header)["pad_token"] == "!"


def test_bos_is_added_where_the_file_or_its_splitting_asks_for_it(tmp_path: Path) -> None:
    writer = tiny_gguf.start_llama(tmp_path / "bos.gguf", 300)
    tokens = tiny_gguf.add_byte_level_vocabulary(writer, "default")
    writer.add_bos_token_id(tokens.index("<|end of text|>"))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    tiny_gguf.finish(writer)
    header = read_gguf_header(tmp_path / "bos.gguf")
    tokenizer = Tokenizer.from_str(tokenizer_json(header))
    assert tokenizer.encode("a").tokens == ["<|end of text|>", "a", "<|end of text|>"]
    assert tokenizer.encode("a", add_special_tokens=False).tokens == ["a"]
    assert tokenizer_config(header)["add_bos_token"] is True


@pytest.mark.parametrize(("said", "adds_bos"), [(None, True), (True, True), (False, False)])
def test_f54_without_a_word_on_bos_pieces_get_one_and_there_may_be_no_template(
    tmp_path: Path, said: bool | None, adds_bos: bool
) -> None:
    writer = tiny_gguf.start_llama(tmp_path / "bos.gguf", 300)
    tiny_gguf.add_sentencepiece_vocabulary(writer, said)
    tiny_gguf.finish(writer)
    header = read_gguf_header(tmp_path / "bos.gguf")
    assert Tokenizer.from_str(tokenizer_json(header)).encode("the").tokens == ["<s>", "▁the"][not adds_bos :]
    config = tokenizer_config(header)
    assert (config["add_bos_token"], "chat_template" in config) == (adds_bos, False)


def test_cl100k_splits_as_llama3_and_adds_nothing(tmp_path: Path) -> None:
    ours = Tokenizer.from_str(tokenizer_json(_byte_level(tmp_path, "dbrx", extra=("cat",))))
    llama = Tokenizer.from_str(tokenizer_json(_byte_level(tmp_path, "llama-bpe")))
    for text in nasty_corpus.EVERYTHING:
        assert ours.pre_tokenizer.pre_tokenize_str(text) == llama.pre_tokenizer.pre_tokenize_str(text), text
    assert ours.encode("cat").tokens == ["c", "a", "t"]


def test_phi3_tokens_swallow_the_space_after_them(tmp_path: Path) -> None:
    tokens = {}
    for arch in ("phi3", "llama"):
        writer = tiny_gguf.start_llama(tmp_path / f"{arch}.gguf", 305, arch)
        tiny_gguf.add_sentencepiece_vocabulary(writer)
        tiny_gguf.finish(writer)
        tokenizer = Tokenizer.from_str(tokenizer_json(read_gguf_header(tmp_path / f"{arch}.gguf")))
        ids = tokenizer.encode("in</s>\n in<s>\nin", add_special_tokens=False).ids
        tokens[arch] = [tokenizer.id_to_token(token_id) for token_id in ids]
    assert tokens["phi3"] == ["▁", "in", "</s>", "in", "<s>", "<0x0A>", "in"]
    assert tokens["llama"] == ["▁", "in", "</s>", "<0x0A>", "▁", "in", "<s>", "<0x0A>", "in"]


def test_named_templates_are_kept_beside_the_default(tmp_path: Path) -> None:
    writer = tiny_gguf.start_llama(tmp_path / "m.gguf", 305)
    tiny_gguf.add_sentencepiece_vocabulary(writer)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    writer.add_chat_template(named)
    tiny_gguf.finish(writer)
    assert tokenizer_config(read_gguf_header(tmp_path / "m.gguf"))["chat_template"] == named


def test_an_unknown_splitting_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(GgufError, match=r"tokenizer.ggml.pre is 'martian'; supported: .*smollm"):
        tokenizer_json(_byte_level(tmp_path, "martian"))


def test_an_unknown_kind_is_refused_by_name(tmp_path: Path) -> None:
    writer = tiny_gguf.start_llama(tmp_path / "wpm.gguf", 3)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(["a", "b", "c"])
    tiny_gguf.finish(writer)
    with pytest.raises(GgufError, match=r"tokenizer.ggml.model is 'bert'; supported: gpt2, llama"):
        tokenizer_json(read_gguf_header(tmp_path / "wpm.gguf"))


def test_a_merge_of_unknown_tokens_is_refused(tmp_path: Path) -> None:
    writer = tiny_gguf.start_llama(tmp_path / "merge.gguf", 3)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a", "b", "c"])
    writer.add_token_merges(["a b"])
    tiny_gguf.finish(writer)
    with pytest.raises(GgufError, match="merge 'a' 'b' names tokens not in the vocabulary"):
        tokenizer_json(read_gguf_header(tmp_path / "merge.gguf"))


def test_converted_files_are_json_with_the_default_model_s_template(smollm2: ModelSource) -> None:
    config = json.loads((smollm2.directory / "tokenizer_config.json").read_text())
    assert config["add_bos_token"] is False
    assert config["model_max_length"] == 8192
    assert "<|im_start|>assistant" in config["chat_template"]


def _byte_level(folder: Path, pre: str, extra: tuple[str, ...] = ()) -> GgufHeader:
    path = folder / f"{pre}.gguf"
    writer = tiny_gguf.start_llama(path, 300)
    tiny_gguf.add_byte_level_vocabulary(writer, pre, extra)
    tiny_gguf.finish(writer)
    return read_gguf_header(path)
