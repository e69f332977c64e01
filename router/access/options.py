"""The router's options about who may use it and how much: keys, addresses, rates, caps of a request, TLS.

Each with its default and a sentence. Knows no file's content and no request.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo import common_options
from octavo.addresses import is_local_host
from octavo.options import Limits, OptionError, option
from router.access.networks import parse_networks
from router.sending import DEFAULT_TIMEOUT_S

_AT_LEAST_ONE = Limits(minimum=1)

DEFAULT_MAX_MESSAGES = 4096


@dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Part of RouterConfig."""

    api_key: str | None = option(
        None,
        "The one key that every request but health checks must carry; better given in OCTAVO_API_KEY than here, where "
        "`ps` shows it.",
        kind="secret",
    )
    key_file: str | None = option(
        None,
        "File of hashed API keys with their tenants, made by `octavo keys`; changes are taken while serving.",
    )
    allow_networks: str = option(
        "", "Networks (CIDR, comma-separated) that clients may come from; everywhere when empty."
    )
    trusted_proxies: str = option(
        "", "Networks (CIDR, comma-separated) of proxies that are believed when X-Forwarded-For names a client."
    )
    tenant_requests_per_minute: int | None = option(
        None, "Requests a minute of each tenant that the key file sets no limit for.", limits=_AT_LEAST_ONE
    )
    tenant_tokens_per_minute: int | None = option(
        None, "Tokens a minute, prompt and output, of each such tenant.", limits=_AT_LEAST_ONE
    )
    tenant_max_concurrent_requests: int | None = option(
        None, "Requests of each such tenant that may run at once.", limits=_AT_LEAST_ONE
    )
    request_timeout: float | None = option(
        None,
        "Longest that a request may take, waiting included; a client's own deadline may be shorter.",
        kind="seconds",
        limits=Limits(minimum=0.001),
    )
    body_timeout: float = option(
        60.0,
        "Longest that the body of an HTTP request may take to come.",
        kind="seconds",
        limits=Limits(0.1, 3600),
    )
    send_timeout: float = option(
        DEFAULT_TIMEOUT_S,
        "Longest that a client may take nothing of what is sent to it before its request ends.",
        kind="seconds",
        limits=Limits(0.1, 3600),
    )
    max_prompt_tokens: int | None = option(
        None, "Longest prompt in tokens; what the context holds when unset.", limits=_AT_LEAST_ONE
    )
    max_prompts: int = option(
        2048,
        "Most prompts in one completion request, and most answers to all of them unless --max-n is more.",
        limits=Limits(1, 2048),
    )
    max_messages: int = option(DEFAULT_MAX_MESSAGES, "Most messages in a conversation.", limits=_AT_LEAST_ONE)
    max_n: int = option(128, "Most choices (n) that a request may ask for.", limits=Limits(1, 128))
    max_logprobs: int = option(20, "Most alternatives for each token (top_logprobs).", limits=Limits(0, 20))
    max_stop_strings: int = option(16, "Most stop strings of a request.", limits=Limits(1, 16))
    max_stop_chars: int = option(1024, "Longest stop string in characters.", limits=Limits(1, 1024))
    max_tools: int = option(128, "Most tools of a request.", limits=Limits(1, 128))
    max_grammar_bytes: int = option(
        256 * 2**10,
        "Longest JSON schema, regular expression or grammar that an answer may be held to.",
        kind="bytes",
        limits=_AT_LEAST_ONE,
    )
    tls_cert: str | None = option(None, "PEM certificate chain of the public ports; with --tls-key they speak TLS.")
    tls_key: str | None = option(None, "PEM private key of --tls-cert.")
    tls_client_ca: str | None = option(
        None, "PEM certificates of the CA whose certificates clients must show on the public ports (mTLS)."
    )
    health_port: int | None = option(
        None,
        "Port of a second HTTP listener for GET /health and GET /ready alone, without TLS and keys, for probes.",
        limits=Limits(0, 65535),
    )
    health_host: str | None = option(None, "Address of --health-port; that of --host when unset.")
    zmq_curve: str = option(
        "auto",
        "Encrypt tokens on their way from the workers, and take them from attached workers alone; auto does so where "
        "--token-listen is not on this machine alone.",
        choices=("auto", "on", "off"),
    )

    def check_access(self) -> None:
        """Raise OptionError for values that do not go together. Called from `__post_init__` of the whole."""
        if self.api_key is not None and not (self.api_key.strip() and self.api_key.isprintable()):
            raise OptionError("--api-key", "(not shown)", "must hold printable characters", "Leave it out for no key")
        for flag, text in (("--allow-networks", self.allow_networks), ("--trusted-proxies", self.trusted_proxies)):
            try:
                parse_networks(text)
            except ValueError as error:
                raise OptionError(flag, text, str(error), "Write networks as 10.0.0.0/8,fd00::/8") from None
        common_options.check_server_options("--tls", self.tls_cert, self.tls_key, self.tls_client_ca, "--tls-client-ca")

    @property
    def asks_for_keys(self) -> bool:
        """Whether requests need a key."""
        return self.api_key is not None or self.key_file is not None

    def wants_curve(self, token_listen: str) -> bool:
        """Whether the token socket at this endpoint is to have CURVE."""
        if self.zmq_curve != "auto":
            return self.zmq_curve == "on"
        host = token_listen.removeprefix("tcp://").rpartition(":")[0]
        return token_listen.startswith("tcp://") and not is_local_host(host)

    def access_without_effect(self) -> tuple[tuple[str, str], ...]:
        """Fields whose value changes nothing because another decides, each with the reason."""
        found: list[tuple[str, str]] = []
        if not self.allow_networks:
            found.append(("trusted_proxies", "--allow-networks is not given, so every address may come in"))
        if self.health_port is None:
            found.append(("health_host", "there is no --health-port"))
        return tuple(found)
