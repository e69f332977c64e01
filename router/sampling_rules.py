"""Ranges of the sampling parameters, one table for numbers and one function for each list.

Knows values and limits; nothing of defaults, prompts or surfaces. Everything here raises `InvalidRequest` naming the
field, the value and the limit, and takes `object`: types come from a client and are checked, not trusted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.integers import INT32_MAX, INT64_MAX, INT64_MIN
from router.errors import InvalidRequest, check_text, show_value

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS_IDS = 2**14
"""More would be checked, and copied for each of n answers, while every other stream of the router waits."""
_INTEGER_KEY = re.compile(r"0|-?[1-9][0-9]{0,18}")


@dataclass(frozen=True)
class NumberRule:
    """A range. `open_low` leaves out the lower bound itself. Integers refuse fractions, and both refuse booleans."""

    low: float
    high: float
    integer: bool = False
    open_low: bool = False

    def check(self, name: str, value: object) -> Any:
        """`value` as int or float."""
        if isinstance(value, bool) or not isinstance(value, int if self.integer else (int, float)):
            kind = "an integer" if self.integer else "a number"
            raise InvalidRequest(name, f"{name} must be {kind}, got {show_value(value)}")
        inside = self.low <= value <= self.high  # NaN compares false with everything
        if not inside or (self.open_low and value == self.low):
            raise InvalidRequest(name, f"{name} must be in {self._range()}, got {show_value(value)}")
        return value if self.integer else float(value)

    def _range(self) -> str:
        low, high = (str(bound) if self.integer else f"{bound:g}" for bound in (self.low, self.high))
        return f"{'(' if self.open_low else '['}{low}, {high}]"


NUMBER_RULES: Mapping[str, NumberRule] = {
    "temperature": NumberRule(0, 2),
    "top_p": NumberRule(0, 1, open_low=True),
    "top_k": NumberRule(0, INT32_MAX, integer=True),
    "min_p": NumberRule(0, 1),
    "presence_penalty": NumberRule(-2, 2),
    "frequency_penalty": NumberRule(-2, 2),
    "repetition_penalty": NumberRule(0, 2, open_low=True),
    "seed": NumberRule(INT64_MIN, INT64_MAX, integer=True),
    "max_tokens": NumberRule(1, INT32_MAX, integer=True),
    "min_tokens": NumberRule(0, INT32_MAX, integer=True),
    "n": NumberRule(1, MAX_CHOICES, integer=True),
    "best_of": NumberRule(1, MAX_CHOICES, integer=True),
    "logprobs": NumberRule(0, MAX_TOP_LOGPROBS, integer=True),
    "prompt_logprobs": NumberRule(0, MAX_TOP_LOGPROBS, integer=True),
}
BIAS_RULE = NumberRule(-100, 100)


def check_flag(name: str, value: object, *, default: bool) -> bool:
    """True, False, or the default for None; numbers and strings are no flags."""
    if value is None:
        return default
    if not isinstance(value, bool):
        raise InvalidRequest(name, f"{name} must be true or false, got {show_value(value)}")
    return value


def check_stop(value: object) -> tuple[str, ...]:
    """Stop strings, without repeats. A string stands for a list of one."""
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, (list, tuple)):
        raise InvalidRequest("stop", f"stop must be a string or a list of strings, got {show_value(value)}")
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"stop must hold at most {MAX_STOP_STRINGS} strings, got {len(items)}")
    for index, item in enumerate(items):
        name = "stop" if isinstance(value, str) else f"stop[{index}]"
        text = check_text(name, item)
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(name, f"{name} must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}")
    return tuple(dict.fromkeys(items))


def check_stop_token_ids(value: object, vocab_size: int) -> tuple[int, ...]:
    """Stop token ids, without repeats."""
    name = "stop_token_ids"
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(name, f"{name} must be a list of integers, got {show_value(value)}")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(name, f"{name} must hold at most {MAX_STOP_TOKEN_IDS} ids, got {len(value)}")
    ids = (check_token_id(f"{name}[{index}]", item, vocab_size) for index, item in enumerate(value))
    return tuple(dict.fromkeys(ids))


def check_logit_bias(value: object, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """(id, bias) by rising id. Keys are integers, or their plain decimal form as JSON must write them."""
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise InvalidRequest("logit_bias", f"logit_bias must map token ids to numbers, got {show_value(value)}")
    if len(value) > MAX_LOGIT_BIAS_IDS:
        raise InvalidRequest("logit_bias", f"logit_bias must hold at most {MAX_LOGIT_BIAS_IDS} ids, got {len(value)}")
    found: dict[int, float] = {}
    for key, bias in value.items():
        number = int(key) if isinstance(key, str) and _INTEGER_KEY.fullmatch(key) is not None else key
        name = f"logit_bias[{show_value(number)}]"
        token_id = check_token_id(name, number, vocab_size)
        found[token_id] = BIAS_RULE.check(name, bias)
    return tuple(sorted(found.items()))


def check_token_id(name: str, value: object, vocab_size: int) -> int:
    """`value` if it is a token id. `name` says where in the request it stands."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(name, f"{name} must be a token id (an integer), got {show_value(value)}")
    if not 0 <= value < vocab_size:
        raise InvalidRequest(
            name, f"{name} must be in [0, {vocab_size - 1}], the model's vocabulary, got {show_value(value)}"
        )
    return value
