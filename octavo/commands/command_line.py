"""Command lines of the processes: which options each command takes, and what is said to one it does not take.

Knows the config classes of all processes, which are light; imports no service.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from octavo.bench.options import BenchConfig
from octavo.commands import vllm_names
from octavo.commands.planning import PlanConfig, ReplayConfig
from octavo.option_parsing import add_options
from octavo.options import Limits, Option, flags_of, option, secrets_of
from router.config import RouterConfig
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig


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
    """The options of one config class in one command, but for those the command decides itself."""

    title: str
    config_class: type
    without: frozenset[str] = frozenset()

    def flags(self) -> Mapping[str, Option]:
        flags = flags_of(self.config_class)
        return {flag: entry for flag, entry in flags.items() if entry.name not in self.without}


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
        OptionGroup("stack", ServeConfig),
        OptionGroup("router", RouterConfig, frozenset({"scheduler_address", "token_listen", "token_advertise"})),
        # What limits a step is the worker's to say; the scheduler takes it from there.
        OptionGroup(
            "scheduler",
            SchedulerConfig,
            frozenset({"host", "port", "metrics_port", "max_num_seqs", "max_num_batched_tokens"}) | _SHARED,
        ),
        OptionGroup("worker", WorkerConfig, _WORKER_IN_STACK),
    ),
    "router": (OptionGroup("router", RouterConfig),),
    "scheduler": (OptionGroup("scheduler", SchedulerConfig),),
    "worker": (OptionGroup("worker", WorkerConfig),),
    "bench": (OptionGroup("bench", BenchConfig),),
    "plan": (
        OptionGroup("plan", PlanConfig),
        OptionGroup("scheduler", SchedulerConfig, _SHELL | {"max_num_seqs", "max_num_batched_tokens"}),
    ),
    "replay": (OptionGroup("replay", ReplayConfig), OptionGroup("scheduler", SchedulerConfig, _SHELL)),
    "doctor": (
        OptionGroup("doctor", DoctorConfig),
        OptionGroup(
            "router",
            RouterConfig,
            frozenset(flag.name for flag in flags_of(RouterConfig).values()) - {"host", "http_port", "grpc_port"},
        ),
        OptionGroup("worker", WorkerConfig, _WORKER_IN_STACK - {"model"}),
    ),
}
"""The commands whose options come from config classes."""


def parse(command: str, description: str, words: Sequence[str]) -> argparse.Namespace:
    """Parse a command's words; exits with status 2 and an answer for an option it does not take."""
    parser = argparse.ArgumentParser(prog=f"octavo {command}", description=description, allow_abbrev=False)
    for group in GROUPS[command]:
        section = parser.add_argument_group(f"{group.title} options")
        add_options(section, group.config_class, without=group.without)
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
