"""Every sampling parameter's range, default and refusal."""

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import WIRE_CODES, ErrorKind, InvalidRequest, show_value
from router.sampling import (
    ModelLimits,
    SamplingDefaults,
    SamplingParams,
    SamplingRequest,
    chat_logprobs,
    check_sampling,
    choice_seed,
)
from router.sampling_rules import MAX_LOGIT_BIAS_IDS, check_logit_bias

LIMITS = ModelLimits(vocab_size=100, max_model_len=50)


def resolve(
    limits: ModelLimits = LIMITS,
    defaults: SamplingDefaults | None = None,
    prompt_tokens: int = 10,
    is_chat: bool = False,
    **said: Any,
) -> SamplingParams:
    return check_sampling(
        SamplingRequest(**said),
        limits,
        defaults or SamplingDefaults(),
        prompt_tokens=prompt_tokens,
        is_chat=is_chat,
        drawn_seed=77,
    )


def refusal(**said: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        resolve(**said)
    return caught.value


EDGES: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0, 0.0, 1e-6, 2, 2.0], [-0.1, 2.1, math.nan, math.inf, -math.inf, True, "1", [1]]),
    ("top_p", [1e-6, 1, 0.5], [0, 0.0, -1, 1.1, math.nan, False, "x"]),
    ("top_k", [0, 1, 10**6], [-1, 1.0, 1.5, True, 2**31, "1", 10**400]),
    ("min_p", [0, 1, 1.0], [-0.1, 1.01, math.nan, True]),
    ("presence_penalty", [-2, 2, 0], [-2.1, 2.1, math.nan, False]),
    ("frequency_penalty", [-2, 2, 0], [-2.1, 2.1, math.inf, True]),
    ("repetition_penalty", [0.01, 2], [0, -1, 2.1, math.nan, True]),
    ("seed", [0, -1, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 1.0, True, "7"]),
    ("max_tokens", [1, 40], [0, -1, 41, 1.0, True, 2**40]),
    ("min_tokens", [0, 16], [-1, 17, 1.0, True]),
    ("n", [1, 128], [0, 129, 1.0, True]),
    ("best_of", [1, 128], [0, 129, 1.0, True]),
    ("logprobs", [0, 20], [-1, 21, 1.0, True]),
    ("prompt_logprobs", [0, 20], [-1, 21, True]),
    ("ignore_eos", [True, False], [1, 0, "true"]),
    ("echo", [True, False], [1, "x"]),
    ("skip_special_tokens", [True, False], [0]),
    ("include_stop_str_in_output", [True, False], [0]),
    (
        "stop",
        ["a", ["a"], ["a"] * 16, "\x00", "x" * 1024],
        ["", [""], ["a", ""], 5, [5], ["a"] * 17, "x" * 1025, "\ud800", {"a": 1}],
    ),
    ("stop_token_ids", [[], [0, 99]], [[100], [-1], [1.0], [True], 5, ["1"], [1] * 1025]),
    (
        "logit_bias",
        [{}, {"5": 1}, {5: -100}, {"99": 100.0}],
        [
            {"100": 5},
            {"-1": 5},
            {"abc": 1},
            {"5": 101},
            {"5": math.nan},
            {"05": 1},
            {" 5": 1},
            {"5": True},
            {True: 1},
            {1.0: 1},
            [1],
            {"5": "1"},
            {"9" * 99: 1},
        ],
    ),
]


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, good, _ in EDGES for value in good])
def test_accepted(name: str, value: Any) -> None:
    resolve(**{name: value})


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, _, bad in EDGES for value in bad])
def test_refused_with_field_and_value(name: str, value: Any) -> None:
    error = refusal(**{name: value})
    assert error.field.startswith(name)
    assert error.message.startswith(name)
    assert len(error.message) < 400
    assert error.codes.http_status == 400


def test_every_field_has_a_case() -> None:
    assert {name for name, _, _ in EDGES} == {field.name for field in dataclasses.fields(SamplingRequest)}


def test_nothing_said() -> None:
    params = resolve()
    expected = SamplingParams(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=77,
        max_tokens=16,
        min_tokens=0,
        n=1,
        best_of=1,
        ignore_eos=False,
        echo=False,
        skip_special_tokens=True,
        include_stop_str_in_output=False,
        logprobs=None,
        prompt_logprobs=None,
    )
    assert params == expected


@pytest.mark.parametrize(
    ("is_chat", "prompt_tokens", "expected"), [(False, 10, 16), (False, 45, 5), (True, 10, 40), (True, 49, 1)]
)
def test_omitted_max_tokens(is_chat: bool, prompt_tokens: int, expected: int) -> None:
    assert resolve(is_chat=is_chat, prompt_tokens=prompt_tokens).max_tokens == expected


def test_max_tokens_over_the_context_names_three_numbers() -> None:
    message = refusal(max_tokens=41).message
    assert "41" in message
    assert "10 prompt" in message
    assert "50 tokens" in message


def test_prompt_without_room_for_a_token() -> None:
    with pytest.raises(InvalidRequest, match="50 tokens and leaves no room"):
        resolve(prompt_tokens=50)
    small_pool = ModelLimits(vocab_size=100, max_model_len=50, pool_tokens=20)
    assert resolve(limits=small_pool, prompt_tokens=19, max_tokens=31).max_tokens == 31
    with pytest.raises(InvalidRequest, match="KV cache holds 20"):
        resolve(limits=small_pool, prompt_tokens=20)


def test_min_tokens_over_max_tokens() -> None:
    assert refusal(min_tokens=6, max_tokens=5).field == "min_tokens"
    assert resolve(min_tokens=5, max_tokens=5).min_tokens == 5


def test_chat_cannot_echo() -> None:
    with pytest.raises(InvalidRequest, match="echo"):
        resolve(is_chat=True, echo=True)


def test_as_many_biases_as_are_checked_in_no_time() -> None:
    """Ids of a large vocabulary, each biased, would hold up every other stream while they are checked."""
    most = {str(token_id): 1 for token_id in range(MAX_LOGIT_BIAS_IDS)}
    assert len(check_logit_bias(most, 2**17)) == MAX_LOGIT_BIAS_IDS
    with pytest.raises(InvalidRequest, match=f"at most {MAX_LOGIT_BIAS_IDS} ids, got {MAX_LOGIT_BIAS_IDS + 1}"):
        check_logit_bias({**most, str(MAX_LOGIT_BIAS_IDS): 1}, 2**17)


def test_lists_lose_repeats_and_bias_is_sorted() -> None:
    params = resolve(stop=["b", "a", "b"], stop_token_ids=[3, 1, 3], logit_bias={"7": 1, "3": -2})
    assert params.stop == ("b", "a")
    assert params.stop_token_ids == (3, 1)
    assert params.logit_bias == ((3, -2.0), (7, 1.0))


def test_request_wins_over_generation_config() -> None:
    config = {
        "temperature": 0.1,
        "top_k": 1,
        "repetition_penalty": 1.3,
        "do_sample": False,
        "top_p": None,
        "eos_token_id": 2,
    }
    defaults = SamplingDefaults.from_generation_config(config)
    assert defaults.differing() == {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.3}
    assert resolve(defaults=defaults).temperature == 0.1
    said = resolve(defaults=defaults, temperature=1.0, top_k=0)
    assert (said.temperature, said.top_k, said.repetition_penalty) == (1.0, 0, 1.3)
    assert SamplingDefaults.from_generation_config({"top_k": -1}) == SamplingDefaults()
    with pytest.raises(InvalidRequest, match=r"generation_config\.json temperature"):
        SamplingDefaults.from_generation_config({"temperature": 9})


@given(st.integers(-(2**63), 2**63 - 1))
def test_choice_seeds(seed: int) -> None:
    seeds = [choice_seed(seed, choice) for choice in range(128)]
    assert seeds[0] == seed
    assert len(set(seeds)) == 128
    assert all(-(2**63) <= value < 2**63 for value in seeds)
    assert resolve(seed=seed).seed_of(3) == seeds[3]


def test_choice_seed_is_the_same_everywhere() -> None:
    assert choice_seed(42, 1) == CHOICE_SEED_42_1


CHOICE_SEED_42_1 = -225867498704701796


@pytest.mark.parametrize(
    ("logprobs", "top", "expected"),
    [
        (None, None, None),
        (False, None, None),
        (None, 0, None),
        (False, 0, None),
        (True, None, 0),
        (True, 0, 0),
        (True, 20, 20),
    ],
)
def test_chat_logprobs(logprobs: Any, top: Any, expected: int | None) -> None:
    assert chat_logprobs(logprobs, top) == expected


@pytest.mark.parametrize(("logprobs", "top"), [(True, 21), (False, 2), (None, 1), (True, True), (1, None), (True, -1)])
def test_chat_logprobs_refused(logprobs: Any, top: Any) -> None:
    with pytest.raises(InvalidRequest, match="logprobs"):
        chat_logprobs(logprobs, top)


def test_the_error_table_is_complete() -> None:
    assert set(WIRE_CODES) == set(ErrorKind)
    pairs = {(row.http_status, row.grpc_status) for row in WIRE_CODES.values()}
    assert {
        (400, "INVALID_ARGUMENT"),
        (404, "NOT_FOUND"),
        (413, "RESOURCE_EXHAUSTED"),
        (429, "RESOURCE_EXHAUSTED"),
    } <= pairs
    assert {(499, "CANCELLED"), (503, "UNAVAILABLE"), (504, "DEADLINE_EXCEEDED"), (401, "UNAUTHENTICATED")} <= pairs


@pytest.mark.parametrize(
    "value", [[1] * 10**6, "x" * 10**6, 10**5000, {"a": "b" * 10**6}, b"x" * 10**6, "\ud800" * 5], ids=type
)
def test_shown_values_are_short_and_printable(value: Any) -> None:
    shown = show_value(value)
    assert len(shown) < 400
    shown.encode()
