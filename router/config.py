"""The router's options, each with its default and a sentence; values found at run time live elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.common_options import InternalTlsOptions, ObservedOptions
from octavo.integers import INT32_MAX, INT64_MAX, INT64_MIN
from octavo.options import DEFAULT_MODEL, Limits, OptionError, argument, check_values, option
from router.access.options import AccessOptions
from router.browser.options import BrowserOptions
from router.replies.formats import TOOL_CALL_PARSERS
from router.replies.reasoning import REASONING_PARSERS
from router.structured.spec import DEFAULT_TIMEOUT_S

_PORT = Limits(0, 65535)


@dataclass(frozen=True)
class RouterConfig(ObservedOptions, InternalTlsOptions, BrowserOptions, AccessOptions):
    """One router process: where it listens, which model's text it speaks, which scheduler it asks."""

    model: str = argument(
        DEFAULT_MODEL,
        "Model whose tokenizer and chat template are used: a directory, a .gguf file or a hub name.",
    )
    served_model_name: str | None = option(
        None, "Name clients call the model by; the last part of the model's path when left out."
    )
    further_models: tuple[str, ...] = option(
        (),
        "Further model, as NAME=MODEL, with a tokenizer and template of its own; for several, give this several times. "
        "`octavo serve` starts a worker of each.",
        flag="--model",
        kind="repeated",
    )
    models: str | None = option(
        None,
        "TOML file of further models, each with its tokenizer and template, and of aliases that stand for several "
        "models by weight; taken again when it changes.",
    )
    host: str = option("127.0.0.1", "Address the public HTTP and gRPC ports listen on.")
    http_port: int = option(8000, "Port of the OpenAI-compatible HTTP API; 0 picks a free one.", limits=_PORT)
    grpc_port: int = option(8001, "Port of the gRPC API; 0 picks a free one.", limits=_PORT)
    scheduler_address: str = option("127.0.0.1:8002", "host:port of the scheduler.")
    token_listen: str = option(
        "tcp://127.0.0.1:0", "ZeroMQ endpoint this router receives tokens on; port 0 picks a free one."
    )
    token_advertise: str | None = option(
        None,
        "Endpoint workers are told to send tokens to, where it differs from what --token-listen bound; unset while "
        "that is every address, this machine's on the way to the scheduler.",
    )
    recovery_timeout: float = option(
        60.0,
        "Longest that a request waits for a replacement when its worker or the scheduler is lost.",
        kind="seconds",
        limits=Limits(minimum=0),
    )
    drain_timeout: float = option(
        30.0,
        "Longest that open requests may take once the router is asked to end (the first Ctrl-C, SIGTERM); what lasts "
        "longer ends with an error.",
        kind="seconds",
        limits=Limits(minimum=0),
    )
    max_message_bytes: int = option(
        16 * 2**20,
        "Largest request body or gRPC message accepted from a client.",
        kind="bytes",
        limits=Limits(2**16, INT32_MAX),
    )
    tool_call_parser: str = option(
        "auto",
        "How the model writes tool calls; auto asks its chat template.",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "How the model marks its thinking, which answers then show apart; auto asks its chat template.",
        choices=REASONING_PARSERS,
    )
    grammar_timeout: float = option(
        DEFAULT_TIMEOUT_S,
        "Longest that compiling the schema or grammar of an answer may take before the request is refused; a step of a "
        "worker may wait as long for it.",
        kind="seconds",
        limits=Limits(minimum=0.1),
    )
    seed: int | None = option(
        None,
        "Seed from which the seeds of requests that bring none are drawn, in the order of their arrival; "
        "unset, they are random.",
        limits=Limits(INT64_MIN, INT64_MAX),
    )
    metrics_by_tenant: bool = option(False, "Count tokens by tenant too, in metrics of their own.")

    def __post_init__(self) -> None:
        check_values(self)
        self.further_sources  # noqa: B018 - raises for a bad one
        self.check_access()
        self.check_internal_tls()
        self.check_browser()
        if self.http_port == self.grpc_port != 0:
            raise OptionError(
                "--grpc-port", self.grpc_port, "is --http-port too", "Give each its own, or 0 for a free one"
            )

    @property
    def name(self) -> str:
        """What clients call the model."""
        return self.served_model_name or Path(self.model).name or Path(self.model).resolve().name

    @property
    def further_sources(self) -> Mapping[str, str]:
        """Further models by name: a directory, a file or a hub name. Raises OptionError for what does not say so."""
        found: dict[str, str] = {}
        for text in self.further_models:
            name, equals, source = text.partition("=")
            if not (name and equals and source):
                remedy = "The first model is the argument MODEL; write others as --model coder=/models/coder"
                raise OptionError("--model", text, "is not NAME=MODEL", remedy)
            if name in (self.name, *found):
                raise OptionError("--model", text, f"{name} is another model's name too", "Give each its own")
            found[name] = source
        return found

    def without_effect(self) -> tuple[tuple[str, str], ...]:
        """Fields whose value changes nothing because another decides, each with the reason."""
        return self.access_without_effect()
