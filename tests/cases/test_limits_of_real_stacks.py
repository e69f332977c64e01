"""What must not reach a worker, and what must not hurt the others there."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from octavo import Client
from octavo.client.errors import InvalidArgument
from octavo.v1 import inference_pb2 as pb
from octavo.v1 import inference_pb2_grpc as pb_grpc
from tests.cases.asking import Asker
from tests.cases.conftest import CONTEXT
from tests.e2e.stack import children_of, listeners_of, resident_bytes
from tests.fakes.tiny_llama import TINY_VOCAB_SIZE, TinyLlama

VOCABULARY = TINY_VOCAB_SIZE + TinyLlama().padding_rows
CANARY = "canary-93b1"
USER_SAYS_A = b'{"messages": [{"role": "user", "content": "a"'


@pytest.mark.parametrize(
    "bias", [{str(VOCABULARY): 5}, {"-1": 5}, {"abc": 1}, {"5": 101}, {"5": -101}, {"5": None}, {"5": "x"}, [5]]
)
def test_f12_bad_biases_are_refused(crowd: Asker, bias: object) -> None:
    answer = crowd.post("/v1/completions", {"prompt": "a", "logit_bias": bias})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"].startswith("logit_bias")) == (400, True), error


def test_f12_ids_out_of_bounds_are_refused_on_both_surfaces(crowd: Asker) -> None:
    for token_id, bias in ((VOCABULARY, 5), (-1, 5), (5, 100.5), (5, -100.5)):
        crowd.refuse("a", f"logit_bias[{token_id}]", logit_bias={token_id: bias})
    for ids, param in (
        ([VOCABULARY], "stop_token_ids[0]"),
        ([-1], "stop_token_ids[0]"),
        ([0, -1], "stop_token_ids[1]"),
    ):
        crowd.refuse("a", param, stop_token_ids=ids, min_tokens=1, max_tokens=4)


def test_f14_narrowest_settings_together_are_greedy(crowd: Asker) -> None:
    def ids(**options: Any) -> list[int]:
        body = {"prompt": "Once", "max_tokens": 12, "ignore_eos": True, "return_token_ids": True, **options}
        answer = crowd.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    greedy = ids(temperature=0)
    limits = [
        {"temperature": 1e-6},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "min_p": 1.0},
    ]
    normal = [{"temperature": 1.0, "seed": seed} for seed in range(8)]
    extra = [
        {"temperature": 0, "logit_bias": {str(greedy[0]): -100}},
        {"temperature": 0, "structured_outputs": {"choice": ["ab"]}},
    ]
    alone = [ids(**options) for options in normal]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda options: ids(**options), [*limits, *normal, *extra]))
    assert found[: len(limits)] == [greedy] * len(limits)
    assert found[len(limits) : len(limits) + len(normal)] == alone
    assert found[-2][0] != greedy[0]


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([-1], "prompt[0]"),
        ([VOCABULARY], "prompt[0]"),
        ([1, 2**31], "prompt[1]"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        (["a", [1]], "prompt[1]"),
        (None, "prompt"),
        ("", "prompt"),
        ([""], "prompt[0]"),
    ],
)
def test_f28_bad_prompts_are_refused_by_index(crowd: Asker, prompt: object, param: str) -> None:
    answer = crowd.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error


@pytest.mark.parametrize("ids", [[], [4294967295], [1, VOCABULARY]])
def test_f28_bad_ids_are_refused_over_grpc(crowd: Asker, ids: list[int]) -> None:
    request = pb.GenerateUnaryRequest(request=pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids)))
    with grpc.insecure_channel(crowd.stack.grpc) as channel:
        stub = pb_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.GenerateUnary(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "raw",
    [
        b'{"prompt": "a\\ud83d b"}',
        b'{"prompt": "\xff\xfe"}',
        b'{"prompt": "a", "stop": ["\\udc00"]}',
        b'{"prompt": "a", "model": "\\ud83d"}',
        b'{"prompt": "a", "user": "\\ud83d"}',
        USER_SAYS_A + b'}], "tools": [{"type": "function", "function": {"name": "\\ud83d"}}]}',
        USER_SAYS_A + b', "name": "\\udfff"}]}',
    ],
)
def test_f32_what_is_no_unicode_is_refused(crowd: Asker, raw: bytes) -> None:
    path = "/v1/chat/completions" if b"messages" in raw else "/v1/completions"
    assert crowd.post(path, raw).status_code == 400


def test_f32_nul_and_a_mark_of_byte_order_are_fine(crowd: Asker) -> None:
    for raw in (b'{"prompt": "\\u0000", "max_tokens": 1}', b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 1}'):
        assert crowd.post("/v1/completions", raw).status_code == 200


def test_f32_a_grpc_string_that_is_no_unicode_is_refused(crowd: Asker) -> None:
    raw = b"\x0a\x09" + b"\x12\x07" + b"a\xff\xfe\xffbcd"  # a request whose text field is not UTF-8
    with grpc.insecure_channel(crowd.stack.grpc) as channel:
        call = channel.unary_unary("/octavo.v1.InferenceService/GenerateUnary")
        with pytest.raises(grpc.RpcError) as refused:
            call(raw, timeout=20)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def one_of(depth: int) -> dict[str, Any]:
    leaf: dict[str, Any] = {"type": "integer"}
    return leaf if depth == 0 else {"oneOf": [one_of(depth - 1), {"type": "string"}]}


DEEP = json.loads('{"type":"array","items":' * 200 + "{}" + "}" * 200)
CYCLE = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
MANY_ITEMS = {"type": "array", "items": {"type": "integer"}, "maxItems": 2**64 - 1}
HOSTILE: dict[str, tuple[dict[str, Any], bool]] = {
    "deep": ({"json_schema": DEEP}, False),
    "cycle": ({"json_schema": CYCLE}, False),
    "one-of": ({"json_schema": one_of(12)}, False),
    "many-items": ({"json_schema": MANY_ITEMS}, True),
    "big-integer": ({"json_schema": {"type": "integer", "maximum": 20_000_000_000}}, True),
    "pattern": ({"json_schema": {"type": "string", "pattern": "[ab]*a[ab]{13}"}}, True),
    "look-behind": ({"json_schema": {"type": "string", "pattern": "(?<=x)*"}}, False),
    "no-schema": ({"json_schema": {"type": "object", "properties": {"foo": "bar"}}}, False),
    "look-behind-regex": ({"regex": "(?<=x)*"}, False),
    "repeats": ({"regex": "((a{999}){999}){999}"}, False),
    "endless": ({"grammar": "root ::= root"}, False),
    "endless-lark": ({"grammar": "start: start"}, False),
    "left-recursion": ({"grammar": 'root ::= root "a" | "a"'}, True),
    "nothing-fits": ({"regex": "[^\\s\\S]"}, False),
    "many-repeats": ({"regex": "a{1000000}"}, False),
    "every-way": ({"json_schema": {"allOf": [{"type": "object"}] * 500}}, True),
    "long-constant": ({"json_schema": {"const": "x" * 100_000}}, True),
    "choice-of-itself": (
        {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}}},
        True,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_f66_hostile_constraints_are_bounded_on_both_surfaces(crowd: Asker, name: str) -> None:
    constraint, is_legal = HOSTILE[name]
    ((kind, given),) = constraint.items()
    structured = {"json" if kind == "json_schema" else kind: given}
    body = {"prompt": "a", "max_tokens": 4, "structured_outputs": structured}
    answer = crowd.post("/v1/completions", body)
    assert answer.status_code == (200 if is_legal else 400), answer.text
    with Client(crowd.stack.grpc) as client:
        if is_legal:
            client.generate("a", max_tokens=4, structured_output=constraint)
            return
        with pytest.raises(InvalidArgument) as refused:
            client.generate("a", max_tokens=4, structured_output=constraint)
    assert (refused.value.field or "").startswith("sampling.structured_output")
    assert answer.json()["error"]["param"].startswith("structured_outputs")


def test_f66_depth_beyond_reading_is_refused(crowd: Asker) -> None:
    deep = b'{"prompt":"a","response_format":{"type":"json_schema","json_schema":{"name":"n","schema":'
    deep += b'{"items":' * 10_000 + b"{}" + b"}" * 10_003
    assert crowd.post("/v1/completions", deep).status_code == 400
    with Client(crowd.stack.grpc) as client, pytest.raises(InvalidArgument):
        client.generate("a", structured_output={"json_schema": '{"items":' * 10_000 + "{}" + "}" * 10_000})


def test_f42_two_live_requests_may_share_an_id(crowd: Asker) -> None:
    def ask(prompt: str) -> tuple[str, str]:
        body = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
        answer = crowd.post("/v1/completions", body, **{"x-request-id": "dup"})
        return answer.headers["x-request-id"], answer.json()["choices"][0]["text"]

    prompts = ["first", "second", "third"]
    alone = [ask(prompt)[1] for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, prompts * 2))
    assert found == [("dup", text) for text in alone * 2]
    options = {"max_tokens": 40, "ignore_eos": True, "temperature": 0, "request_id": "dup"}
    with Client(crowd.stack.grpc) as client:
        with ThreadPoolExecutor(6) as pool:
            results = pool.map(lambda prompt: client.generate(prompt, **options), prompts * 2)
            assert [(result.request_id, result.text) for result in results] == found
        for prompt, text in zip(prompts, alone, strict=True):
            left = client.generate("another", **options, stream=True)
            next(iter(left))
            left.cancel()
            assert client.generate(prompt, **options).text == text
        for given, shown in (("x" * 2**20, "x" * 128), ("a\nb/ c", "abc")):
            assert client.generate("a", max_tokens=1, request_id=given).request_id == shown
        assert client.generate("a", max_tokens=1, request_id="").request_id
    long = crowd.http.get("/version", headers={"x-request-id": "x" * 4000 + "y"}).headers["x-request-id"]
    assert long == "x" * 128
    assert crowd.http.get("/version", headers={"x-request-id": ""}).headers["x-request-id"]


def test_f62_f64_what_no_model_here_can_do_is_said(crowd: Asker) -> None:
    for path, body in (("/v1/embeddings", {"input": ["a"]}), ("/v1/rerank", {"query": "q", "documents": ["a"]})):
        answer = crowd.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    with grpc.insecure_channel(crowd.stack.grpc) as channel:
        for name in ("Embed", "Rerank"):
            method: Any = channel.unary_unary(f"/octavo.v1.InferenceService/{name}")
            with pytest.raises(grpc.RpcError) as refused:
                method(b"")
            failure: Any = refused.value
            assert failure.code() is grpc.StatusCode.UNIMPLEMENTED
            assert "generate text" in failure.details()


def test_f72_no_path_writes_texts_to_the_log(crowd: Asker) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": CANARY}}}
    for body in (
        {"prompt": CANARY, "max_tokens": 4},
        {"prompt": CANARY * CONTEXT, "max_tokens": 4},
        {"prompt": CANARY, "max_tokens": 4, "response_format": schema},
        {"prompt": CANARY, "temperature": CANARY},
        {"prompt": "a", "stop": [CANARY], "user": CANARY, "model": CANARY},
    ):
        crowd.post("/v1/completions", body, authorization=f"Bearer {CANARY}")
    crowd.post("/v1/completions", b'{"prompt": "' + CANARY.encode())
    crowd.http.get(f"/{CANARY}")
    assert CANARY not in crowd.stack.log


def test_f30_a_long_body_is_refused_and_health_answers_meanwhile(crowd: Asker) -> None:
    bodies = [json.dumps({"prompt": "word " * (size // 5)}).encode() for size in (5 * 2**20, 27 * 2**20)]
    statuses: list[int] = []
    sender = threading.Thread(
        target=lambda: statuses.extend(crowd.post("/v1/completions", b).status_code for b in bodies)
    )
    num_answers = 0
    with type(crowd.http)(base_url=crowd.stack.http, timeout=20) as http:
        assert http.get("/health").status_code == 200
        sender.start()
        while sender.is_alive():
            assert http.get("/health").status_code == 200
            num_answers += 1
    sender.join()
    assert statuses == [413, 413]
    assert num_answers, "health answered meanwhile"
    # What was sent is not kept: the same again leaves the router as large as it is now.
    before_bytes = resident_bytes(crowd.stack.pid_of("router"))
    for body in bodies * 3:
        assert crowd.post("/v1/completions", body).status_code == 413
    assert resident_bytes(crowd.stack.pid_of("router")) - before_bytes < len(bodies[-1])


GARBAGE = (
    b"\x80\x04\x95cposix\nsystem\n.",  # a pickle
    b"\xff\xff\xff\x7f\x00\x00",  # a length of 2^31
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x7f\xff\xff\x00\x00",  # half a frame
    b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    bytes(range(256)) * 64,
)


def test_f68_garbage_on_every_port_is_dropped(crowd: Asker) -> None:
    ports = {port for pid in children_of(crowd.stack.process.pid) for _, port in listeners_of(pid)}
    assert len(ports) >= 6, "HTTP, gRPC, tokens, the scheduler, and metrics of two"
    for port in sorted(ports):
        for data in GARBAGE:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection, contextlib.suppress(OSError):
                connection.sendall(data)
