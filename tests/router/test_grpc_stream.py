"""Responses put together by hand: the same messages that protobuf makes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.v1 import inference_pb2 as pb
from router.grpc_stream import EncodedResponses, MessageResponses
from router.prepared import Prepared
from router.replies.types import ToolCallDelta
from router.requests import ChoiceEnd, Event, PromptInfo, QueueInfo, RequestOptions, TextDelta, TokenInfo, Usage
from router.sampling import ModelLimits, SamplingDefaults, SamplingRequest, check_sampling
from router.streams.types import ReceiptParts
from router.text.model_text import load_model_text

UINT32 = st.integers(0, 2**32 - 1) | st.sampled_from([0, 1, 127, 128, 2**12 - 1, 2**12, 2**14, 2**32 - 1])
INFOS = st.sampled_from([(), (), (), (TokenInfo(70, b"x", -0.5),)])
DELTAS = st.builds(
    TextDelta,
    UINT32,
    st.text(st.characters(exclude_categories=["Cs"]), max_size=200),
    UINT32,
    st.lists(UINT32, max_size=40).map(tuple),
    INFOS,
    st.sampled_from(["", "", "because"]),
    st.sampled_from([(), (), (ToolCallDelta(0, "call-1", "f", "{"),)]),
)
OTHERS = st.sampled_from(
    [
        ChoiceEnd(0, "stop", 4, ReceiptParts(replica="r"), 7, stop_string="."),
        Usage(1, 2, 3),
        QueueInfo(4, 0.5),
        PromptInfo(1, (TokenInfo(70, b"x", -0.5),)),
    ]
)


@pytest.fixture(scope="module")
def prepared(model_dir: Path) -> Prepared:
    text = load_model_text("m" * 300, model_dir)
    limits = ModelLimits(text.tokenizer.vocab_size, 100, None)
    params = check_sampling(SamplingRequest(), limits, SamplingDefaults(), prompt_tokens=2, is_chat=True, drawn_seed=7)
    return Prepared("id", (70, 71), params, RequestOptions("m" * 300, "mine"), (0,), text, 0.0)


@settings(max_examples=400, deadline=None)
@given(event=DELTAS | OTHERS, response_type=st.sampled_from([pb.GenerateResponse, pb.ChatResponse]))
def test_the_bytes_are_those_of_the_message(
    prepared: Prepared, event: Event, response_type: type[pb.GenerateResponse | pb.ChatResponse]
) -> None:
    made = MessageResponses(response_type, prepared).of(event)
    encoded = EncodedResponses(response_type, prepared).of(event)
    assert response_type.FromString(encoded) == made
    assert encoded == made.SerializeToString()
