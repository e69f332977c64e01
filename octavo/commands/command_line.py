"""Command lines of the processes: which options each command takes, and what is said to one it does not take.

Knows where the config classes of all processes are, and imports those of the command at hand; imports no service.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from octavo.commands import vllm_names
from octavo.option_parsing import add_options
from octavo.options import Limits, Option, flags_of, option, secrets_of


@dataclass(frozen=True)
class ServeConfig:
    """What `octavo serve` itself decides, beside the options of its processes."""

    data_parallel_size: int = option(
        1, "Workers that hold the model, each a whole replica; they share the cores.", limits=Limits(1, 1024)
    )
    scheduler_port: int = option(
        0,
        "Port of the scheduler, on this machine alone, for `octavo ctl`, `octavo top` and further workers; 0 picks a "
        "free one.",
        limits=Limits(0, 65535),
    )
    metrics_port: int = option(
        0,
        "Port of the scheduler's GET /metrics; the workers' are the ones after it. 0 picks free ones. The router's is "
        "on --http-port.",
        limits=Limits(0, 65535),
    )
    demo: bool = option(False, "Stream the answer to a sample prompt once ready, then go on serving.")


@dataclass(frozen=True)
class DoctorConfig:
    """What `octavo doctor` itself decides."""

    run: bool = option(False, "Prove the installation on a tiny random model: kernels, core, and a whole stack.")


@dataclass(frozen=True)
class OptionGroup:
    """The options of one config class in one command, but for those the command decides itself.

    `config` is the class as module:name, imported with the first look at it: each process of a stack starts through
    this module, and needs its own class alone.
    """

    title: str
    config: str
    without: frozenset[str] = frozenset()
    only: frozenset[str] | None = None
    """When given, the options that are there at all."""

    @property
    def config_class(self) -> type:
        return config_class(self.config)

    @property
    def left_out(self) -> frozenset[str]:
        """Names of the options that the command does not take."""
        names = {entry.name for entry in flags_of(self.config_class).values()}
        return self.without if self.only is None else self.without | (names - self.only)

    def flags(self) -> Mapping[str, Option]:
        flags, left_out = flags_of(self.config_class), self.left_out
        return {flag: entry for flag, entry in flags.items() if entry.name not in left_out}


def config_class(config: str) -> type:
    """The config class that is written module:name."""
    module, _, name = config.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


ROUTER, SCHEDULER, WORKER = (
    "router.config:RouterConfig",
    "scheduler_svc.config:SchedulerConfig",
    "worker_svc.config:WorkerConfig",
)
_SERVE, _DOCTOR = f"{__name__}:ServeConfig", f"{__name__}:DoctorConfig"

_OBSERVED = frozenset({"log_level", "log_format", "otlp_endpoint", "otlp_sampling_ratio"})
"""How every process logs and traces."""

_INTERNAL_TLS = frozenset({"internal_tls_cert", "internal_tls_key", "internal_tls_ca"})
"""What every process shows the others."""

_SHARED = frozenset({"model", "served_model_name"}) | _OBSERVED | _INTERNAL_TLS
_SCRAPED = frozenset({"metrics_host", "metrics_port"})
_WORKER_IN_STACK = frozenset({"scheduler_address"}) | _SHARED | _SCRAPED

_SHELL = (
    frozenset({"host", "port", "token_networks", "flight_recorder_size", "record_tokens", "check_laws"})
    | frozenset({"stats_interval"})
    | _OBSERVED
    | _SCRAPED
    | _INTERNAL_TLS
)
"""What the scheduler's process decides around its core."""

GROUPS: Mapping[str, tuple[OptionGroup, ...]] = {
    "serve": (
        OptionGroup("stack", _SERVE),
        OptionGroup("router", ROUTER, frozenset({"scheduler_address", "token_listen", "token_advertise"})),
        # What limits a step is the worker's to say; the scheduler takes it from there.
        OptionGroup(
            "scheduler",
            SCHEDULER,
            frozenset({"host", "port", "metrics_port", "max_num_seqs", "max_num_batched_tokens"}) | _SHARED,
        ),
        OptionGroup("worker", WORKER, _WORKER_IN_STACK),
    ),
    "router": (OptionGroup("router", ROUTER),),
    "scheduler": (OptionGroup("scheduler", SCHEDULER),),
    "worker": (OptionGroup("worker", WORKER),),
    "bench": (OptionGroup("bench", "octavo.bench.options:BenchConfig"),),
    "plan": (
        OptionGroup("plan", "octavo.commands.planning:PlanConfig"),
        OptionGroup("scheduler", SCHEDULER, _SHELL | {"max_num_seqs", "max_num_batched_tokens"}),
    ),
    "replay": (
        OptionGroup("replay", "octavo.commands.planning:ReplayConfig"),
        OptionGroup("scheduler", SCHEDULER, _SHELL),
    ),
    "doctor": (
        OptionGroup("doctor", _DOCTOR),
        OptionGroup(
            "router",
            ROUTER,
            only=frozenset({"host", "http_port", "grpc_port"}),
        ),
        OptionGroup("worker", WORKER, _WORKER_IN_STACK - {"model"}),
    ),
}
"""The commands whose options come from config classes."""


def parse(command: str, description: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command's words; exits with status 2 and an answer for an option it does not take."""
    parser = argparse.ArgumentParser(prog=f"octavo {command}", description=description, allow_abbrev=False)
    for group in GROUPS[command]:
        section = parser.add_argument_group(f"{group.title} options")
        add_options(section, group.config_class, without=group.left_out)
    namespace, unknown = parser.parse_known_args(words)
    if unknown:
        flags = [word for word in unknown if word.startswith("-")]
        surplus = [f"{unknown[0]!r} is one argument too many"]
        refuse(parser.prog, [explain(flag, command) for flag in flags] or surplus)
    for entry in (entry for group in GROUPS[command] for entry in secrets_of(group.config_class)):
        if hasattr(namespace, entry.name):
            print(
                f"{parser.prog}: {entry.flag} on a command line can be read by everybody on this machine (`ps`); "
                f"give it in {entry.variable}",
                file=sys.stderr,
            )
    return namespace


def refuse(program: str, reasons: Iterable[str]) -> NoReturn:
    """Name each thing that is wrong with the command line, and exit with status 2."""
    for reason in reasons:
        print(f"{program}: {reason}", file=sys.stderr)
    raise SystemExit(2)


def explain(word: str, command: str) -> str:
    """Why a command does not take an option, and what to write in its place."""
    flag = word.split("=", 1)[0]
    ours = _commands_by_flag()
    own = [name for name, commands in ours.items() if command in commands]
    spelled = flag.replace("_", "-")
    if spelled != flag and spelled in own:
        return f"{flag} is spelled {spelled} here"
    if (told := vllm_names.answer(flag)) is not None:
        return told
    if flag in ours:
        places = " and ".join(f"`octavo {place}`" for place in ours[flag])
        return f"{flag} has no effect in `octavo {command}`; it is an option of {places}"
    near = difflib.get_close_matches(spelled, own, n=1)
    hint = f"did you mean {near[0]}?" if near else f"see `octavo {command} --help`"
    return f"{flag} is not an option; {hint}"


def _commands_by_flag() -> dict[str, list[str]]:
    """Every option, and the commands that take it; `doctor` only looks."""
    found: dict[str, list[str]] = {}
    for command, groups in sorted(GROUPS.items()):
        for flag in dict.fromkeys(flag for group in groups for flag in group.flags()):
            found.setdefault(flag, [])
            if command != "doctor":
                found[flag].append(command)
    return found
