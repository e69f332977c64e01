"""Messages as JSON: protobuf's own reading is the slow twin, and what would hold up other streams is bounded."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from connectrpc.errors import ConnectError
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from octavo.v1 import inference_pb2 as pb
from router.browser import call as calls
from router.browser.json_codec import LONG, MOST_VALUES, JsonCodec
from tests.fakes.router_stack import in_loop, stack
from tests.fakes.web_rpc import Form, call

CODEC = JsonCodec()


def texts() -> st.SearchStrategy[str]:
    return st.one_of(st.text(max_size=9), st.integers(LONG - 1, LONG + 2).map(lambda count: "ñ" * count))


def messages() -> st.SearchStrategy[list[pb.ChatMessage]]:
    calls_made = st.builds(pb.ToolCall, id=texts(), arguments_json=texts())
    return st.lists(
        st.builds(pb.ChatMessage, role=texts(), content=texts(), tool_calls=st.lists(calls_made, max_size=2)),
        max_size=3,
    )


ids = st.one_of(
    st.lists(st.integers(0, 2**32 - 1), max_size=4),
    st.integers(LONG - 1, LONG + 2).map(lambda count: list(range(count))),
)
sampling = st.builds(
    pb.SamplingParams,
    seed=st.integers(-(2**63), 2**63 - 1),
    logit_bias=st.dictionaries(st.integers(0, 99), st.integers(-9, 9), max_size=3),
    stop=st.lists(texts(), max_size=3),
)
requests = st.one_of(
    st.builds(pb.ChatRequest, model=texts(), messages=messages(), sampling=sampling),
    st.builds(pb.GenerateRequest, token_ids=st.builds(pb.TokenIds, ids=ids), sampling=sampling, resume=st.binary()),
    st.builds(pb.GenerateRequest, text=texts()),
    st.builds(pb.TokenizeRequest, chat=st.builds(pb.ChatRequest, messages=messages())),
    st.builds(pb.DetokenizeRequest, token_ids=ids),
)


@given(requests, st.booleans())
def test_it_reads_as_protobuf_does(request: Any, proto_names: bool) -> None:
    text = json_format.MessageToJson(request, preserving_proto_field_name=proto_names).encode()
    assert CODEC.decode(text, type(request)) == json_format.Parse(text, type(request)()) == request
    assert CODEC.decode(CODEC.encode(request), type(request)) == request


@pytest.mark.parametrize(
    "body",
    [
        {"tokenIds": {"ids": [1] * LONG + [-1]}},
        {"tokenIds": {"ids": [1] * LONG + [2**32]}},
        {"tokenIds": {"ids": [1] * LONG + [True]}},
        {"tokenIds": {"ids": [1] * LONG + [1.5]}},
        {"text": "a" * LONG + "\ud800"},
        {"text": "a" * LONG * 2, "tokenIds": {"ids": []}},
        {"sampling": {"seed": "a" * LONG * 2}},
        {"model": ["a" * LONG * 2]},
        {"sampling": [{"stop": 3}]},
    ],
)
def test_what_is_long_and_wrong_is_refused_too(body: Any) -> None:
    with pytest.raises(json_format.ParseError):
        json_format.Parse(json.dumps(body), pb.GenerateRequest())
    with pytest.raises(ConnectError, match=r"octavo\.v1\.GenerateRequest") as refused:
        CODEC.decode(json.dumps(body).encode(), pb.GenerateRequest)
    assert len(refused.value.message) < 500


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{}] * (MOST_VALUES + 1)},
        {"sampling": {"stopTokenIds": ["1"] * (MOST_VALUES + 1)}},
        {"sampling": {"logitBias": {str(key): 1 for key in range(MOST_VALUES + 1)}}},
        {"unknown": [[[]] * (MOST_VALUES // 2)] * 2},
    ],
)
def test_values_are_counted_before_protobuf_reads_them(body: Any) -> None:
    with pytest.raises(ConnectError, match=str(MOST_VALUES)):
        CODEC.decode(json.dumps(body).encode(), pb.ChatRequest)


@in_loop
async def test_other_tasks_run_while_a_large_answer_is_written(model_dir: Path) -> None:
    """The loop's turns go on during the call that makes the JSON; it is the same JSON."""
    answer = pb.GenerateUnaryResponse()
    content = answer.choices.add().content
    for token_id in range(20_000):
        content.logprobs.add(token_id=token_id, text="word", logprob=-1.0)
    assert answer.ByteSize() > calls.LARGE_BYTES

    async def method(request: Any, context: Any) -> Any:
        return answer

    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count_turns())
    context: Any = SimpleNamespace(request_headers={"content-type": "application/json; charset=utf-8"})
    written = await calls.unary(method, {"json": CODEC}, pb.GenerateUnaryRequest(), context)
    counting.cancel()
    assert turns > 1
    assert written == CODEC.encode(answer)


@in_loop
async def test_large_answers_are_the_same_in_every_form(model_dir: Path) -> None:
    request = pb.GenerateUnaryRequest(
        request=pb.GenerateRequest(
            text="a", sampling=pb.SamplingParams(max_tokens=200, seed=1), output=pb.OutputOptions(logprobs=20)
        )
    )
    async with stack(model_dir) as made:
        made.say("x" * 150, 50)
        answers = [await call(made.http, form, "GenerateUnary", request, {"x-request-id": "a"}) for form in Form]
        assert answers[0].messages[0].ByteSize() > calls.LARGE_BYTES
        assert all(answer.messages == answers[0].messages for answer in answers)
