"""Options of `octavo bench`: whom to ask, what, how hard, how often, and what would be good enough. Knows no server."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from octavo.bench.load import Load
from octavo.bench.slo import Slo
from octavo.options import Limits, OptionError, argument, check_values, option
from octavo.workload import Sizes, parse_sizes

_AT_LEAST_ONE = Limits(minimum=1)
ANSWER_LENGTHS = "answer"
"""In place of output lengths: those of the file's own answers."""


@dataclass(frozen=True)
class BenchConfig:
    """One benchmark."""

    target: str = argument(
        "grpc://127.0.0.1:8001",
        "The server: grpc://HOST:PORT or grpcs:// of an Octavo router, http://HOST:PORT or https:// of any OpenAI "
        "server (default: grpc://127.0.0.1:8001).",
    )
    model: str = option("", "Served name of the model; the server's first when left out.")
    endpoint: str = option(
        "completions", "Ask for completions of a prompt or in a chat.", choices=("completions", "chat")
    )
    api_key: str | None = option(None, "Key to show the server.", kind="secret")
    tls_ca: str | None = option(None, "PEM certificates of the CA to trust in place of the system's.")
    extra_body: str = option("", "JSON object of further fields of each request (HTTP).")

    concurrency: str | None = option(
        None, "Closed loop: so many requests open at once; several, as 1,8,32, are a sweep. 8 when no load is named."
    )
    request_rate: str | None = option(
        None, "Open loop: so many requests a second, whatever the server does; or several."
    )
    arrivals: str = option("poisson", "How the requests of an open loop come.", choices=("poisson", "fixed"))
    num_requests: int | None = option(
        None,
        "Requests of one run; when left out, four times as many as are open at once, of a rate those of --duration, "
        "and at least 16.",
        limits=Limits(1, 10**7),
    )
    duration: float = option(
        30.0, "How long requests of a rate come, where --num-requests is left out.", kind="seconds", limits=Limits(0.1)
    )
    repeats: int = option(1, "Runs at each load; the report shows their mean and range.", limits=Limits(1, 1000))
    num_warmups: int = option(1, "Requests before the first run, which are not measured.", limits=Limits(0, 10**6))
    timeout: float = option(600.0, "Longest that one answer may take.", kind="seconds", limits=Limits(0.1))
    seed: int = option(0, "Seed of prompts, lengths and arrivals.")

    prompts: str | None = option(
        None, "File of prompts: lines of text, or .jsonl or .json of ShareGPT, Alpaca, OpenAI messages or prompts."
    )
    trace: str | None = option(
        None, "File of requests with their times and lengths, as `octavo plan --trace` reads it; an open loop."
    )
    trace_speed: float = option(1.0, "How many times faster than written a trace is played.", limits=Limits(1e-6, 1e6))
    prompt_tokens: str = option(
        "512", "Lengths of made-up prompts: N, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEDIAN:SIGMA."
    )
    output_tokens: str = option(
        "128",
        "Lengths of answers, spelled as prompt lengths are; `answer`: those of the answers that the file gives.",
    )
    num_prefixes: int = option(
        0, "Made-up prompts begin with one of so many shared prefixes; 0: all are distinct.", limits=Limits(0)
    )
    prefix_tokens: int = option(256, "Length of a shared prefix.", limits=_AT_LEAST_ONE)
    vocab_size: int | None = option(
        None,
        "Make prompts up of any ids below this, in place of those that the server's tokenizer has for an English text.",
        limits=_AT_LEAST_ONE,
    )
    ignore_eos: bool = option(True, "Ask for answers of exactly the asked length.")
    temperature: float = option(0.0, "Randomness of the answers.", limits=Limits(0, 2))
    salt_cache: bool = option(
        False, "Give each run a cache salt of its own, so that it finds no prompt of an earlier one (Octavo, vLLM)."
    )

    slo: str = option("", "Most milliseconds that a request may take, as ttft=500,tpot=50,itl=200,e2e=10000.")
    slo_share: float = option(
        0.95, "Share of requests that must keep --slo for a load to be within the limit.", limits=Limits(0.01, 1)
    )
    find_limit: str | None = option(
        None, "Find the hardest load within --slo, by bisection.", choices=("concurrency", "rate")
    )
    most_load: float = option(1024.0, "Hardest load that --find-limit tries.", limits=Limits(0.01, 10**6))

    json: str | None = option(None, "Write the result to this file, for `octavo bench compare`.")
    plot: str | None = option(None, "Draw latency against throughput into this SVG file.")
    server_pid: int | None = option(
        None, "Process whose tree is the server; found from the port when left out.", limits=_AT_LEAST_ONE
    )

    def __post_init__(self) -> None:
        check_values(self)
        if self.find_limit is not None and not self.slo:
            raise OptionError("--find-limit", self.find_limit, "needs --slo", "Give one, as ttft=500,tpot=50")
        if self.prompts is not None and self.trace is not None:
            raise OptionError("--trace", self.trace, "--prompts is given too", "Give one of them")
        loads = {
            "--trace": self.trace,
            "--request-rate": self.request_rate,
            "--concurrency": self.concurrency,
            "--find-limit": self.find_limit,
        }
        if len(given := [flag for flag, value in loads.items() if value is not None]) > 1:
            remedy = "Give one of them"
            raise OptionError(given[0], loads[given[0]], f"is a load of its own, beside {given[1]}", remedy)
        if self.output_tokens == ANSWER_LENGTHS and self.prompts is None:
            raise OptionError("--output-tokens", ANSWER_LENGTHS, "needs --prompts", "Give a file that has answers")
        # What is spelled in words of its own is read once here, so that a bad word ends the command at once.
        _ = (self.limits, self.loads, self.prompt_sizes, self.output_sizes, self.extra_fields)

    @property
    def limits(self) -> Slo | None:
        """What is good enough. Raises OptionError."""
        try:
            return Slo.parse(self.slo) if self.slo else None
        except ValueError as error:
            raise OptionError("--slo", self.slo, str(error), "Use ttft=500,tpot=50") from None

    @property
    def loads(self) -> tuple[Load, ...]:
        """The loads of the sweep. Raises OptionError."""
        if self.trace is not None:
            return (Load("trace", self.trace_speed),)
        if self.request_rate is not None:
            return tuple(Load("rate", value) for value in _numbers("--request-rate", self.request_rate))
        values = _numbers("--concurrency", self.concurrency or "8")
        if bad := [value for value in values if value < 1 or value != int(value)]:
            raise OptionError("--concurrency", bad[0], "must be a whole number of at least 1", "Use 1,8,32")
        return tuple(Load("concurrency", value) for value in values)

    @property
    def prompt_sizes(self) -> Sizes:
        """Lengths of made-up prompts. Raises OptionError."""
        return _sizes("--prompt-tokens", self.prompt_tokens)

    @property
    def output_sizes(self) -> Sizes:
        """Lengths of answers, where no file gives them. Raises OptionError."""
        return _sizes("--output-tokens", "128" if self.output_tokens == ANSWER_LENGTHS else self.output_tokens)

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Further fields of each request. Raises OptionError."""
        try:
            fields = json.loads(self.extra_body or "{}")
        except ValueError:
            fields = None
        if not isinstance(fields, dict):
            raise OptionError("--extra-body", self.extra_body, "is no JSON object", """Use '{"top_k": 20}'""")
        return fields

    def num_requests_at(self, load: Load) -> int:
        """Requests of one run at a load; a trace has its own number."""
        if self.num_requests is not None:
            return self.num_requests
        return max(16, round(load.value * (self.duration if load.kind == "rate" else 4)))


def _numbers(flag: str, text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(word) for word in text.split(","))
    except ValueError:
        values = ()
    if not values or any(not 0 < value <= 1e6 for value in values):
        raise OptionError(flag, text, "must be numbers above 0, with commas between them", "Use 1,8,32")
    return values


def _sizes(flag: str, text: str) -> Sizes:
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise OptionError(flag, text, str(error), "Use a number such as 512") from None
