"""Becomes one process of the stack: options, logging, lifeline, the service's code, checks, then its own main.

The service is imported here and nowhere else. A supervised process waits with all that follows until the supervisor has
checked for it. Whatever ends the start is said in one line, the last one on standard error.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.commands import command_line
from octavo.logs import setup_logging
from octavo.options import OptionError, differences, from_args, options_of
from octavo.process import (
    LIFELINE_VARIABLE,
    StartError,
    await_gate,
    die_with_parent,
    quiet_grpc,
    say_last_words,
)

_LOG = logging.getLogger(__name__)
_OWN_PACKAGES = ("octavo", "router", "scheduler_svc", "worker_svc", "kernels")


@dataclass(frozen=True)
class Service:
    """A process of the stack: its config, its sentence, and the module whose `main(config)` it runs."""

    name: str
    config: str
    """module:name of its config class."""
    module: str
    description: str

    @property
    def config_class(self) -> type[Any]:
        return command_line.config_class(self.config)


SERVICES = {
    service.name: service
    for service in (
        Service("router", command_line.ROUTER, "router.server", "Run a router: the public gRPC and HTTP APIs."),
        Service(
            "scheduler",
            command_line.SCHEDULER,
            "scheduler_svc.server",
            "Run the scheduler: queues, KV blocks, and what each step computes.",
        ),
        Service("worker", command_line.WORKER, "worker_svc.server", "Run a worker: the model and its KV cache."),
    )
}


def run(name: str, words: Sequence[str]) -> int:
    """Run the service until it ends; returns the exit status."""
    service = SERVICES[name]
    try:
        config: Any = from_args(service.config_class, command_line.parse(name, service.description, words))
    except OptionError as error:
        command_line.refuse(f"octavo {name}", [str(error)])
    return become(service, config)


def become(service: Service, config: Any) -> int:
    """Turn this process into the service; returns its exit status, 1 with the cause in the last line."""
    setup_logging(service.name, config.log_level, config.log_format)
    quiet_grpc()
    supervised = LIFELINE_VARIABLE in os.environ
    die_with_parent()
    try:
        main = _import_main(service.module)
        await_gate()
        for line in (*differences(config), *without_effect(config)):
            _LOG.info("option %s", line)
        if not supervised:  # the supervisor has checked for all of its children
            _check(service.name, config)
        return main(config)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return say_cause(f"octavo {service.name}", service.name, error)


def _import_main(module: str) -> Callable[[Any], int]:
    """Imports the service; what comes with it stays, so the collector of garbage need not walk it, now or ever."""
    gc.disable()
    try:
        main: Callable[[Any], int] = importlib.import_module(module).main
        gc.freeze()
    finally:
        gc.enable()
    return main


def say_cause(program: str, extra: str, error: Exception) -> int:
    """Write why the process ends as the last line; a defect of ours is logged with its traceback before it."""
    if isinstance(error, (StartError, OptionError, *_source_errors())):
        cause = str(error)
    elif isinstance(error, ModuleNotFoundError) and not _is_ours(error.name):
        cause = f"{error.name} is not installed. Run: pip install 'octavo[{extra}]'"
    else:
        _LOG.error("unexpected %s", type(error).__name__, exc_info=error)
        cause = f"{type(error).__name__}: {error}"
    say_last_words(program, cause)
    return 1


def without_effect(config: Any) -> list[str]:
    """A line for each option that was given and changes nothing, with the reason."""
    if not hasattr(config, "without_effect"):
        return []
    entries = {entry.name: entry for entry in options_of(type(config))}
    return [
        f"{entries[name].label} has no effect: {reason}"
        for name, reason in config.without_effect()
        if getattr(config, name) != entries[name].default
    ]


def _source_errors() -> tuple[type[Exception], ...]:
    """The errors of octavo.sources, which is not loaded only to name them: unloaded it has raised none."""
    sources = sys.modules.get("octavo.sources")
    return () if sources is None else (sources.SourceError,)


def _is_ours(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in _OWN_PACKAGES


def _check(name: str, config: Any) -> None:
    from octavo.commands import preflight

    preflight.check_service(name, config)
