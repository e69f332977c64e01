"""Constrained rows on the runner: what they say follows their grammars, and is the same however they are run."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from octavo.internal.v1 import types_pb2
from tests.fakes.checkpoint_files import ModelFiles, write_model
from tests.fakes.thread_group import on_ranks
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama, random_tensors, tiny_config
from tests.fakes.tiny_tokenizers import END_TOKEN, Style, tiny_tokenizer
from tests.worker.harness import Driver, RunnerShape, Tracked, answer, build_runner, sampling
from worker_svc.grammar import GrammarCompiler, load_grammar_vocabulary
from worker_svc.parallel.group import TPGroup

END = types_pb2.FINISH_REASON_END_TOKEN
STOP = types_pb2.FINISH_REASON_STOP_TOKEN
LENGTH = types_pb2.FINISH_REASON_LENGTH
GRAMMAR_ERROR = types_pb2.FINISH_REASON_GRAMMAR_ERROR

PIECES = ['{"', '": ', '", "', "true", " name", "ab", "abc", "é", "né", "12", "0.", "  ", "}}", "日本", "\n"]
SPECIALS = ["<|call|>"]
END_ID = 0
relaxed = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass(frozen=True)
class Model:
    """A random checkpoint whose tokens are bytes and pieces, and a runner over it that follows grammars."""

    directory: Path
    driver: Driver
    tokenizer: Tokenizer
    end_id: int

    def say(self, grammar: types_pb2.Grammar, prompt: str = "x", **params: object) -> Tracked:
        """One answer."""
        sequence = self.add(grammar, prompt, **params)
        self.driver.finish(sequence)
        return sequence

    def add(self, grammar: types_pb2.Grammar | None, prompt: str = "x", **params: object) -> Tracked:
        tokens = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        defaults: dict[str, object] = {"max_tokens": 60, "end_token_ids": [self.end_id], "temperature": 1.0}
        return self.driver.add(tokens, sampling(**{**defaults, **params}, grammar=grammar))

    def token_id(self, name: str) -> int:
        found = self.tokenizer.token_to_id(name)
        assert found is not None
        return int(found)

    def text(self, sequence: Tracked) -> str:
        """What the output says, after a first token so that no blank is taken for the text's start."""
        text: str = self.tokenizer.decode([*sequence.tokens[: sequence.num_prompt], *sequence.output])
        prompt: str = self.tokenizer.decode(sequence.tokens[: sequence.num_prompt])
        return text.removeprefix(prompt)


def compiler_for(directory: Path, tokenizer: Tokenizer) -> GrammarCompiler:
    size, end_ids = tokenizer.get_vocab_size(), [END_ID]
    return GrammarCompiler(lambda: load_grammar_vocabulary(directory, size, end_ids), end_ids)


def open_model(directory: Path, style: Style) -> Model:
    pieces = [piece for piece in PIECES if style == "byte_level" or len(piece.encode()) > 1]
    tokenizer = tiny_tokenizer(pieces, style, SPECIALS)
    padding = tokenizer.get_vocab_size() - TINY_VOCAB_SIZE + 5
    shape = TinyLlama(num_layers=1, padding_rows=padding)
    files = ModelFiles(tiny_config(shape), random_tensors(shape), tokenizer, tokenizer_config={"eos_token": END_TOKEN})
    write_model(directory, files)
    shape_of_runner = RunnerShape(vocab_size=tokenizer.get_vocab_size())
    runner = build_runner(directory, shape_of_runner, grammars=compiler_for(directory, tokenizer))
    return Model(directory, Driver(runner), tokenizer, END_ID)


def test_the_vocabulary_is_loaded_for_the_first_grammar_or_when_there_is_leisure(models: dict[Style, Model]) -> None:
    directory, tokenizer = models["byte_level"].directory, models["byte_level"].tokenizer
    loads: list[threading.Event] = []

    def compiler(leisure_s: float) -> GrammarCompiler:
        loaded = threading.Event()
        loads.append(loaded)

        def load() -> LLTokenizer:
            loaded.set()
            return load_grammar_vocabulary(directory, tokenizer.get_vocab_size(), [END_ID])

        return GrammarCompiler(load, [END_ID], leisure_s)

    busy, idle = compiler(leisure_s=3600.0), compiler(leisure_s=0.0)
    try:
        assert loads[1].wait(60.0)
        assert not loads[0].is_set()
        assert busy.start(regex("[ab]+"), []).result(60.0)
        assert loads[0].is_set()
    finally:
        busy.close()
        idle.close()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[Style, Model]:
    """One model of either kind of vocabulary."""
    styles: tuple[Style, ...] = ("byte_level", "byte_fallback")
    return {style: open_model(tmp_path_factory.mktemp(style), style) for style in styles}


@pytest.fixture(params=["byte_level", "byte_fallback"])
def model(request: pytest.FixtureRequest, models: dict[Style, Model]) -> Model:
    """Each of them, with nothing running."""
    return emptied(models[request.param])


@pytest.fixture
def byte_model(models: dict[Style, Model]) -> Model:
    """The byte-level one, with nothing running."""
    return emptied(models["byte_level"])


def emptied(model: Model) -> Model:
    model.driver.runner.reset()
    return replace(model, driver=Driver(model.driver.runner))


def regex(pattern: str) -> types_pb2.Grammar:
    return types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_REGEX, text=pattern)


def schema(value: object) -> types_pb2.Grammar:
    return types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_JSON_SCHEMA, text=json.dumps(value))


def lark(text: str) -> types_pb2.Grammar:
    return types_pb2.Grammar(kind=types_pb2.GRAMMAR_KIND_LARK, text=text)


# No \d: grammars know the digits of a newer Unicode than re does.
PATTERNS = st.recursive(
    st.sampled_from(["a", "bc", "[a-e]", "é", "日本", "[0-9]", "(ab|abc)", "[^x]", " ", "né{1,2}"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.integers(0, 2), st.integers(0, 2)).map(
            lambda found: f"({found[0]}){{{found[1]},{found[1] + found[2]}}}"
        ),
        inner.map(lambda one: f"({one})?"),
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": -5, "maximum": 120},
            {"type": "boolean"},
            {"type": "string", "maxLength": 4},
            {"enum": ["né", "日本", 3, None]},
            {"type": "string", "pattern": "^[a-c]{1,3}$"},
            {"const": {"a": [1]}},
        ]
    ),
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b é", " name"]), inner, max_size=2).map(
            lambda found: {
                "type": "object",
                "properties": found,
                "required": list(found)[:1],
                "additionalProperties": False,
            }
        ),
        inner.map(lambda one: {"type": "array", "items": one, "maxItems": 2}),
        st.tuples(inner, inner).map(lambda pair: {"anyOf": list(pair)}),
    ),
    max_leaves=4,
)


@relaxed
@given(pattern=PATTERNS, seed=st.integers(0, 2**32))
def test_answers_match_their_regex(model: Model, pattern: str, seed: int) -> None:
    said = model.say(regex(pattern), seed=seed)
    assert said.finish == END
    assert re.fullmatch(pattern, model.text(said))


@relaxed
@given(wanted=VALUES, seed=st.integers(0, 2**32))
def test_answers_fit_their_schema(model: Model, wanted: dict[str, object], seed: int) -> None:
    said = model.say(schema({**wanted, "x-guidance": {"whitespace_flexible": False}}), seed=seed, max_tokens=120)
    assert said.finish == END
    jsonschema.validate(json.loads(model.text(said)), wanted)


@pytest.mark.parametrize("texts", [["yes", "no"], ["ab", "abc", "abcd"], ["né", "n"], ["日本", "日"], ['a"b\\', " "]])
def test_a_choice_is_one_of_its_texts(model: Model, texts: list[str]) -> None:
    grammar = lark("start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts))
    said = [model.say(grammar, seed=seed) for seed in range(8)]
    assert all(sequence.finish == END for sequence in said)
    assert {model.text(sequence) for sequence in said} <= set(texts)


def test_special_tokens_spell_no_text(model: Model) -> None:
    said = [model.say(regex("<.call.>"), seed=seed) for seed in range(3)]
    assert model.tokenizer.token_to_id("<|call|>") not in {token for one in said for token in one.output}
    assert model.end_id not in model.say(regex("(?s:.){40}"), seed=1).output


@pytest.mark.parametrize("name", ["<|call|>", "né"])
def test_a_token_can_be_asked_for_by_its_id(byte_model: Model, name: str) -> None:
    token_id = byte_model.tokenizer.token_to_id(name) or byte_model.tokenizer.token_to_id("nÃ©")
    said = byte_model.say(lark(f'start: <[{token_id}]> "ab"'))
    assert said.output[0] == token_id
    assert said.finish == END


def test_constrained_and_free_rows_share_steps(model: Model) -> None:
    params: dict[str, Any] = {"seed": 7, "num_logprobs": 2}
    grammars = [regex("[a-z]{8}é"), None, schema({"type": "array", "items": {"type": "integer"}, "maxItems": 3})]
    alone = []
    for grammar in grammars:
        sequence = model.add(grammar, "the prompt", **params)
        model.driver.finish(sequence)
        alone.append(answer(sequence))
    together = [model.add(grammar, "the prompt", **params) for grammar in grammars]
    model.driver.finish(*together, chunk=3)
    assert [answer(sequence) for sequence in together] == alone


def behind_thinking(grammar: types_pb2.Grammar, **thinking: Any) -> types_pb2.Grammar:
    found = types_pb2.Grammar(thinking=types_pb2.Thinking(**{"opener": "0.", "closer": "}}", **thinking}))
    found.MergeFrom(grammar)
    return found


def favour(model: Model, name: str) -> dict[str, Any]:
    """Parameters under which a random model soon says a token."""
    return {"bias_token_ids": [model.token_id(name)], "bias_values": [3.0]}


def test_thinking_is_free_and_the_answer_behind_it_is_not(model: Model) -> None:
    open_grammar = behind_thinking(regex("[a-c]{3}"), is_open=True)
    said = [model.say(open_grammar, seed=seed, max_tokens=200, **favour(model, "}}")) for seed in range(6)]
    assert all(sequence.finish == END for sequence in said)
    parts = [model.text(sequence).split("}}", 1) for sequence in said]
    assert all(re.fullmatch(r"\s{0,16}[a-c]{3}", answer) for _, answer in parts)
    assert len({thought for thought, _ in parts}) > 1


def test_a_closer_that_is_a_special_token_is_never_spelled(model: Model) -> None:
    call_id = model.token_id("<|call|>")
    # A closer that the model would often spell, were it allowed to.
    grammar = behind_thinking(schema({"enum": [1, 2]}), closer="a", closer_id=call_id, is_open=True)
    for seed in range(6):
        said = model.say(grammar, seed=seed, max_tokens=200, **favour(model, "<|call|>"))
        assert said.finish == END
        at = said.output.index(call_id)
        assert "a" not in model.tokenizer.decode(said.output[:at])
        assert json.loads(model.tokenizer.decode(said.output[at:])) in (1, 2)


@pytest.mark.parametrize("closer", ["</think>", "[/THINK]", "<|end_of_thought|>", "</思考 *.>", "^\\d$"])
def test_any_closer_can_be_a_special_token(byte_model: Model, closer: str) -> None:
    grammar = behind_thinking(regex("x"), closer=closer, closer_id=byte_model.token_id("<|call|>"), is_open=True)
    said = byte_model.say(grammar, max_tokens=200, **favour(byte_model, "<|call|>"))
    assert said.finish == END
    assert byte_model.text(said).endswith("x")


def test_thinking_that_the_prompt_has_not_opened_may_be_left_out(model: Model) -> None:
    grammar = behind_thinking(regex("x{4}"))
    x_id = model.tokenizer.encode("x", add_special_tokens=False).ids[-1]
    for wanted, shape in ((model.token_id("0."), r"0\.(?s:.*?)}}\s{0,16}x{4}"), (x_id, "x{4}")):
        bias: dict[str, Any] = {"bias_token_ids": [wanted, model.token_id("}}")], "bias_values": [20.0, 19.0]}
        said = model.say(grammar, max_tokens=200, **bias)
        assert re.fullmatch(shape, model.text(said))


def test_an_answer_behind_thinking_resumes_where_it_was(model: Model) -> None:
    grammar = behind_thinking(schema({"type": "array", "items": {"enum": ["é", 12]}, "minItems": 4}), is_open=True)
    params: dict[str, Any] = {"seed": 4, "num_logprobs": 1, "max_tokens": 40, **favour(model, "}}")}
    check_resumes(model, grammar, params, every=8)


def test_an_answer_resumes_where_it_was(model: Model) -> None:
    grammar = schema({"type": "object", "properties": {"é": {"type": "string", "minLength": 9}}, "required": ["é"]})
    params: dict[str, Any] = {"seed": 3, "num_logprobs": 1, "max_tokens": 24}
    check_resumes(model, grammar, params, every=7)


def check_resumes(model: Model, grammar: types_pb2.Grammar, params: dict[str, Any], every: int) -> None:
    """Resumed elsewhere after 1 token, `every` more, and so on, the answer is what it is as a whole."""
    whole = model.say(grammar, **params)
    for num_before in range(1, len(whole.output), every):
        lost = model.add(grammar, **params)
        while len(lost.output) < num_before:
            model.driver.step({lost.key: len(lost.tokens) - lost.num_computed})
        resumed = model.driver.resume(lost)
        model.driver.preempt(lost)
        model.driver.finish(resumed)
        assert (answer(resumed), resumed.finish) == (answer(whole), whole.finish)


def test_a_preempted_row_finds_its_place_again(model: Model) -> None:
    grammar = regex("(ab|abc|né){9}")
    whole = model.say(grammar, seed=5)
    cut = model.add(grammar, seed=5)
    for _ in range(4):
        model.driver.step({cut.key: len(cut.tokens) - cut.num_computed})
    model.driver.preempt(cut)
    model.driver.finish(cut)
    assert answer(cut) == answer(whole)


def test_logprobs_are_those_of_the_free_model(byte_model: Model) -> None:
    said = byte_model.say(regex("[xyz]{5}"), num_logprobs=0)
    free = byte_model.driver.add(said.tokens, sampling(max_tokens=1, num_prompt_logprobs=0, prompt_logprobs_start=1))
    byte_model.driver.finish(free)
    expected = [free.prompt_logprobs[position][0] for position in range(said.num_prompt, len(said.tokens))]
    assert [found.tokens.tolist()[0] for found in said.logprobs] == expected


def test_max_tokens_cuts(model: Model) -> None:
    said = model.say(regex("[a-z]{50}"), max_tokens=7)
    assert said.finish == LENGTH
    assert re.fullmatch("[a-z]{7,}", model.text(said))


def test_ignore_eos_goes_on_until_the_grammar_is_complete(model: Model) -> None:
    said = model.say(regex("a{2,9}"), end_token_ids=[])
    assert (model.text(said), said.finish) == ("a" * 9, END)


def test_min_tokens_delays_the_end_but_not_a_complete_grammar(model: Model) -> None:
    for seed in range(4):
        assert len(model.say(regex("[a-z]+"), min_tokens=5, seed=seed, max_tokens=6).output) >= 5
    done = model.say(regex("x"), min_tokens=5)
    assert (model.text(done), done.finish) == ("x", END)


def test_stop_ids_count_where_the_grammar_allows_them(byte_model: Model) -> None:
    stop = byte_model.token_id("b")
    said = byte_model.say(regex("aba"), stop_token_ids=[stop])
    assert (byte_model.text(said), said.finish) == ("a", STOP)


@pytest.mark.parametrize(
    "grammar",
    [regex("a("), lark("start: nothing"), types_pb2.Grammar(), regex(r"[^\s\S]")],
    ids=["regex", "lark", "kind", "no text"],
)
def test_a_grammar_that_cannot_be_followed_ends_its_row_alone(model: Model, grammar: types_pb2.Grammar) -> None:
    bad, good = model.add(grammar), model.add(regex("[ab]{5}"))
    model.driver.finish(bad, good)
    assert (bad.output, bad.finish) == ([], GRAMMAR_ERROR)
    assert (len(model.text(good)), good.finish) == (5, END)


def test_a_row_without_a_token_to_say_ends_alone(byte_model: Model) -> None:
    # min_tokens forbids the stop ids, and the grammar everything else.
    stuck = [byte_model.token_id(name) for name in ("d",)]
    bad = byte_model.say(regex("abd"), stop_token_ids=stuck, min_tokens=9)
    assert (byte_model.text(bad), bad.finish) == ("ab", GRAMMAR_ERROR)


def test_prior_tokens_that_break_the_grammar_end_the_row(byte_model: Model) -> None:
    broken = byte_model.add(regex("abc"))
    broken.tokens.append(byte_model.token_id("d"))
    byte_model.driver.finish(broken)
    assert broken.finish == GRAMMAR_ERROR


def test_every_rank_follows_its_rows_alike(byte_model: Model) -> None:
    directory, tokenizer = byte_model.directory, byte_model.tokenizer
    grammars = [regex("(ab|abc|né){4}"), regex("a("), schema({"type": "array", "items": {"type": "boolean"}})]

    def run(group: TPGroup) -> list[tuple[list[int], int]]:
        shape = RunnerShape(vocab_size=tokenizer.get_vocab_size())
        runner = build_runner(directory, shape, group=group, grammars=compiler_for(directory, tokenizer))
        model = Model(directory, Driver(runner), tokenizer, byte_model.end_id)
        rows = [model.add(grammar, seed=2, temperature=0.8, max_tokens=12) for grammar in grammars]
        model.driver.finish(*rows)
        return [(row.output, row.finish) for row in rows]

    first, second = on_ranks(2, run)
    assert first == second
    assert [finish for _, finish in first] == [END, GRAMMAR_ERROR, first[2][1]]


def test_a_runner_without_a_vocabulary_fails_constrained_rows(tiny_directory: Path) -> None:
    driver = Driver(build_runner(tiny_directory, RunnerShape(vocab_size=TINY_VOCAB_SIZE)))
    bad, free = driver.add([5], sampling(grammar=regex("a"))), driver.add([5], sampling(max_tokens=2))
    driver.finish(bad, free)
    assert (bad.finish, free.finish) == (GRAMMAR_ERROR, LENGTH)
