"""Lines of a stream: a frame filled in says what a chunk made anew says, whatever was written before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.openai.chat import ChatFormat
from router.openai.completions import CompletionFormat
from router.openai.lines import EventLines
from router.openai.schema import AnswerForm
from router.prepared import Prepared
from router.replies.types import ToolCallDelta
from router.requests import ChoiceEnd, Event, RequestOptions, TextDelta, TokenInfo, Usage
from router.sampling import ModelLimits, SamplingDefaults, SamplingRequest, check_sampling
from router.streams.types import ReceiptParts
from router.text.model_text import ModelText, load_model_text
from tests.fakes.router_stack import MODEL

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=6) | st.sampled_from(["\0", '"', "\\u0000", '"\0"'])
DELTAS = st.builds(
    TextDelta,
    st.integers(0, 1),
    TEXTS,
    st.just(3),
    st.sampled_from([(), (70,), (70, 71)]),
    st.sampled_from([(), (), (TokenInfo(70, b"x", -0.5),)]),
    st.sampled_from(["", "", "because"]),
    st.sampled_from([(), (), (ToolCallDelta(0, "call-1", "f", "{"),)]),
)
ENDS = st.builds(ChoiceEnd, st.integers(0, 1), st.just("stop"), st.just(4), st.just(ReceiptParts()), st.just(7))
FORMS = st.builds(
    AnswerForm,
    stream=st.just(True),
    include_usage=st.booleans(),
    continuous_usage=st.booleans(),
    token_ids=st.booleans(),
    tokens_as_ids=st.booleans(),
    metrics=st.booleans(),
)


@pytest.fixture(scope="module")
def text(model_dir: Path) -> ModelText:
    return load_model_text(MODEL, model_dir)


def prepare(text: ModelText, logprobs: int | None) -> Prepared:
    request = SamplingRequest(n=2, max_tokens=9, logprobs=logprobs)
    limits = ModelLimits(text.tokenizer.vocab_size, 100, None)
    params = check_sampling(request, limits, SamplingDefaults(), prompt_tokens=2, is_chat=True, drawn_seed=7)
    return Prepared("id", (70, 71), params, RequestOptions(MODEL), (0,), text, 0.0)


@settings(max_examples=300, deadline=None)
@given(
    is_chat=st.booleans(),
    num_prompts=st.integers(1, 2),
    form=FORMS,
    logprobs=st.sampled_from([None, 0]),
    events=st.lists(st.tuples(st.integers(0, 1), DELTAS | ENDS), max_size=12),
)
def test_frames_say_what_whole_chunks_say(
    text: ModelText,
    is_chat: bool,
    num_prompts: int,
    form: AnswerForm,
    logprobs: int | None,
    events: list[tuple[int, Event]],
) -> None:
    prepared = [prepare(text, logprobs)] * (1 if is_chat else num_prompts)
    make = ChatFormat if is_chat else CompletionFormat
    framed, whole = (EventLines(make(prepared, 1234, form), form, prepared) for _ in range(2))
    for position, event in events:
        item = position % len(prepared), event
        assert list(framed.write(item)) == list(whole.write_whole(item))
    usage = 0, Usage(2, 3)
    assert list(framed.write(usage)) == list(whole.write_whole(usage))
    assert list(framed.last()) == list(whole.last())


def test_a_line_is_an_event_of_json(text: ModelText) -> None:
    form = AnswerForm(stream=True, include_usage=True)
    prepared = [prepare(text, None)]
    lines = EventLines(CompletionFormat(prepared, 1234, form), form, prepared)
    written = [line for word in ("one", 'two "\n', "") for line in lines.write((0, TextDelta(0, word, 0, (70,))))]
    read = [json.loads(line.removeprefix("data: ")) for line in written]
    assert [chunk["choices"][0]["text"] for chunk in read] == ["one", 'two "\n']
    assert all(line.endswith("\n\n") and line.count("\n") == 2 for line in written)
    assert all(chunk["usage"] is None for chunk in read)
