"""Real processes, scraped and traced: the requests just made show in all three."""

from __future__ import annotations

import json
import urllib.request

import pytest

from octavo.options import DEFAULT_MODEL
from tests.e2e.stack import Stack, eventually, serving
from tests.fakes.scraped import scrape
from tests.fakes.trace_collector import collecting

pytestmark = pytest.mark.e2e

NUM_REQUESTS = 3
MAX_TOKENS = 8
PROMPT = "Once upon a time there was a small model that served a large number of people. " * 3
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
COSTS = "step_ms=1,prefill_tokens_per_s=100000"


def complete(stack: Stack, request_id: str) -> int:
    """One completion; returns its number of prompt tokens."""
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {
        "Content-Type": "application/json",
        "X-Request-Id": request_id,
        "traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01",
    }
    request = urllib.request.Request(f"{stack.http}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        usage = json.load(answer)["usage"]
    assert usage["completion_tokens"] == MAX_TOKENS
    return int(usage["prompt_tokens"])


def test_a_scraped_and_traced_stack_shows_the_requests_just_made() -> None:
    options = ("--simulate", "--simulated-costs", COSTS, "--stats-interval", "0.05", "--log-format", "json")
    with collecting() as collector:
        with serving(DEFAULT_MODEL, *options, "--otlp-endpoint", collector.endpoint) as stack:
            num_prompt_tokens = [complete(stack, f"mine-{number}") for number in range(NUM_REQUESTS)]
            ports = stack.metrics_ports

            def is_over() -> bool:
                found = scrape(ports["scheduler"])
                name = "octavo_scheduler_attempts_ended_total"
                return found.has(name, reason="length") and found.of(name, reason="length") == NUM_REQUESTS

            eventually(is_over, 30.0, "the scheduler has counted the ends")
            router, scheduler, worker = (scrape(ports[name]) for name in ("router", "scheduler", "worker"))
            greeted = [f"curl http://127.0.0.1:{port}/metrics" for port in ports.values()]
            eventually(lambda: all(line in stack.log for line in greeted), 30.0, "the addresses are printed")
            eventually(lambda: " tok/s, generation " in stack.log, 30.0, "a line about the load is logged")
            assert stack.stop() == 0
        lines = [line for line in stack.lines if line.startswith("{")]
    name = DEFAULT_MODEL
    assert router.of("octavo_requests_total", model=name) == NUM_REQUESTS
    assert router.of("octavo_prompt_tokens_total", model=name) == sum(num_prompt_tokens)
    assert router.of("octavo_generation_tokens_total", model=name) == NUM_REQUESTS * MAX_TOKENS
    assert router.of("octavo_request_success_total", model=name, finish_reason="length") == NUM_REQUESTS
    assert router.of("octavo_time_to_first_token_seconds_count", model=name) == NUM_REQUESTS
    assert scheduler.of("octavo_request_queue_time_seconds_count", model=name) == NUM_REQUESTS
    assert scheduler.of("octavo_scheduler_sampled_tokens_total", model=name) == NUM_REQUESTS * MAX_TOKENS
    assert scheduler.of("octavo_prefix_cache_queries_total", model=name) == sum(num_prompt_tokens)
    assert scheduler.of("octavo_prefix_cache_hits_total", model=name) > 0
    assert scheduler.of("octavo_num_requests_running", model=name) == 0
    assert worker.of("octavo_worker_sampled_tokens_total", model=name) == NUM_REQUESTS * MAX_TOKENS
    assert worker.of("octavo_step_time_seconds_count", model=name) >= NUM_REQUESTS * MAX_TOKENS
    assert worker.of("octavo_zmq_refused_sends_total", model=name) == 0
    assert worker.has("octavo_worker_start_seconds", phase="import")
    messages = [json.loads(line) for line in lines]
    assert {message["process"] for message in messages} >= {"router", "scheduler", "worker", "serve"}
    ids = {message.get("request_id") for message in messages if message["process"] == "router"}
    assert {f"mine-{number}" for number in range(NUM_REQUESTS)} <= ids
    totals = {message["process"]: message["message"] for message in messages if "totals:" in message["message"]}
    assert totals.keys() == {"router", "scheduler", "worker"}
    assert f"{NUM_REQUESTS * MAX_TOKENS} generated tokens" in totals["router"]
    assert PROMPT not in stack.log
    spans = {name: collector.named(f"octavo.{name}") for name in ("request", "attempt", "queue", "prefill", "decode")}
    assert {name: len(found) for name, found in spans.items()} == dict.fromkeys(spans, NUM_REQUESTS)
    assert {span.trace_id for found in spans.values() for span in found} == {TRACE_ID}
    assert {span.service for found in spans.values() for span in found} == {
        "octavo-router",
        "octavo-scheduler",
        "octavo-worker",
    }
    attempts = {span.span_id for span in spans["attempt"]}
    assert {span.parent_id for name in ("queue", "prefill", "decode") for span in spans[name]} == attempts
    assert {span.parent_id for span in spans["attempt"]} == {span.span_id for span in spans["request"]}
    assert all(span.attributes["octavo.num_tokens"] == MAX_TOKENS for span in spans["decode"])
    assert PROMPT not in repr(collector.spans)
