"""Every metric of a router, as data; `metrics` counts them, docs/metrics.md is made from them."""

from __future__ import annotations

from octavo.metrics import COUNT_BUCKETS, LATENCY_BUCKETS_S, TOKEN_BUCKETS_S, counter, gauge, histogram

TTFT = histogram(
    "octavo_time_to_first_token_seconds",
    "From a request's arrival to the first token of each of its sequences.",
    LATENCY_BUCKETS_S,
    "model",
)
INTER_TOKEN = histogram(
    "octavo_inter_token_latency_seconds",
    "Between two deltas of a sequence; a delta is one token, or several that came together.",
    TOKEN_BUCKETS_S,
    "model",
)
TPOT = histogram(
    "octavo_request_time_per_output_token_seconds",
    "Mean time of a sequence's tokens after its first, once for each sequence of two tokens or more.",
    TOKEN_BUCKETS_S,
    "model",
)
E2E = histogram(
    "octavo_e2e_request_latency_seconds",
    "From a request's arrival to the end of each of its sequences, however it ended.",
    LATENCY_BUCKETS_S,
    "model",
)
PREFILL = histogram(
    "octavo_request_prefill_time_seconds",
    "From a sequence's first admission to its first token, transport included: time to first token less the queue's.",
    LATENCY_BUCKETS_S,
    "model",
)
DECODE = histogram(
    "octavo_request_decode_time_seconds",
    "From the first to the last token of each sequence.",
    LATENCY_BUCKETS_S,
    "model",
)
REQUESTS = counter("octavo_requests_total", "Requests that passed every check and were begun.", "model")
LIVE = gauge("octavo_router_requests_live", "Requests between their acceptance and their end at this router.")
PROMPT_TOKENS = counter("octavo_prompt_tokens_total", "Prompt tokens of begun requests.", "model")
GENERATION_TOKENS = counter("octavo_generation_tokens_total", "Output tokens handed to clients.", "model")
CACHED_TOKENS = counter(
    "octavo_prompt_tokens_cached_total", "Prompt tokens that the usage of ended sequences reports as cached.", "model"
)
PROMPT_SIZE = histogram("octavo_request_prompt_tokens", "Prompt tokens of each request.", COUNT_BUCKETS, "model")
GENERATION_SIZE = histogram(
    "octavo_request_generation_tokens", "Output tokens of each complete sequence.", COUNT_BUCKETS, "model"
)
NUM_CHOICES = histogram("octavo_request_params_n", "Sequences of each request.", (1, 2, 5, 10, 20, 128), "model")
SUCCESSES = counter(
    "octavo_request_success_total",
    "Complete sequences by finish_reason: stop (an end token), stop_token, stop_string, length, or another that the "
    "answer names.",
    "model",
    "finish_reason",
)
ABORTS = counter(
    "octavo_request_aborts_total",
    "Sequences ended while they ran, by reason: client_gone, stop_string (complete, cut at the scheduler), deadline, "
    "cancelled (by an operator), unavailable, exhausted, internal and so on.",
    "model",
    "reason",
)
REFUSALS = counter(
    "octavo_request_refusals_total",
    "Requests that ended with an error, by its kind and the HTTP status that stands for it on both surfaces.",
    "reason",
    "code",
)
ATTEMPTS = counter("octavo_request_attempts_total", "Calls to the scheduler for sequences that have ended.", "model")
RECOVERIES = counter(
    "octavo_request_recoveries_total", "Attempts beyond a sequence's first: it was resumed elsewhere or anew.", "model"
)
RECOVERED = counter("octavo_request_recovered_total", "Sequences that were complete after a recovery.", "model")
LOOP_LAG = histogram(
    "octavo_router_event_loop_lag_seconds",
    "How much later than asked the event loop woke up, sampled twice a second.",
    (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5),
)
DROPPED_MESSAGES = counter(
    "octavo_router_dropped_messages_total", "Messages on the token socket that were no token batch."
)
SCHEDULER_CONNECTED = gauge("octavo_router_scheduler_connected", "1 while the scheduler's Watch is open, else 0.")
READY = gauge("octavo_router_ready", "1 while a token can be produced now, else 0.")
TENANT_PROMPT_TOKENS = counter(
    "octavo_tenant_prompt_tokens_total", "Prompt tokens by tenant; only with --metrics-by-tenant.", "model", "tenant"
)
TENANT_GENERATION_TOKENS = counter(
    "octavo_tenant_generation_tokens_total",
    "Output tokens of ended sequences by tenant; only with --metrics-by-tenant.",
    "model",
    "tenant",
)

CATALOGUE = (
    TTFT,
    INTER_TOKEN,
    TPOT,
    E2E,
    PREFILL,
    DECODE,
    REQUESTS,
    LIVE,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    CACHED_TOKENS,
    PROMPT_SIZE,
    GENERATION_SIZE,
    NUM_CHOICES,
    SUCCESSES,
    ABORTS,
    REFUSALS,
    ATTEMPTS,
    RECOVERIES,
    RECOVERED,
    LOOP_LAG,
    DROPPED_MESSAGES,
    SCHEDULER_CONNECTED,
    READY,
    TENANT_PROMPT_TOKENS,
    TENANT_GENERATION_TOKENS,
)
