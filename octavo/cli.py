"""The command `octavo`: finds the subcommand, and imports only what that one needs.

Must not import a service, grpc, or anything slow: `octavo --help` is answered at once.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """A subcommand: its sentence in the help, and what runs it with the words after its name."""

    help: str
    run: Callable[[Sequence[str]], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `octavo` with the given words, or the process's own; returns the exit status."""
    try:
        status = _run(list(sys.argv[1:] if arguments is None else arguments))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python writes out as it ends
        return 1
    return status


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if words else 2
    name = "version" if words[0] == "--version" else words[0]
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean `octavo {near[0]}`?" if near else "see `octavo --help`"
        print(f"octavo: there is no command {name!r}; {hint}", file=sys.stderr)
        return 2
    return command.run(words[1:])


def usage() -> str:
    """The help of `octavo` itself."""
    lines = [f"  {name:<10} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: octavo COMMAND [OPTIONS]",
            "",
            "Serves large language models over gRPC and HTTP.",
            "",
            *lines,
            "",
            "`octavo COMMAND --help` lists the options of a command.",
        ]
    )


def _serve(words: Sequence[str]) -> int:
    from octavo.stack.serve import serve

    return serve(words)


def _service(name: str) -> Callable[[Sequence[str]], int]:
    def run(words: Sequence[str]) -> int:
        from octavo.commands import services

        return services.run(name, words)

    return run


def _doctor(words: Sequence[str]) -> int:
    from octavo.commands.doctor import doctor

    return doctor(words)


def _client(name: str) -> Callable[[Sequence[str]], int]:
    """A command of the client: octavo.chat adds its options to a parser and runs what was parsed."""

    def run(words: Sequence[str]) -> int:
        import argparse
        import importlib

        from octavo.process import quiet_grpc

        quiet_grpc()
        chat: Any = importlib.import_module("octavo.chat")
        parser = argparse.ArgumentParser(prog=f"octavo {name}", allow_abbrev=False)
        chat.add_parser(parser, name)
        status: int = chat.main(name, parser.parse_args(words))
        return status

    return run


def _operator(name: str) -> Callable[[Sequence[str]], int]:
    """A command for operators: the module of its name in octavo.commands, with a function of its name."""

    def run(words: Sequence[str]) -> int:
        import importlib

        from octavo.commands.services import say_cause
        from octavo.process import StartError, quiet_grpc

        quiet_grpc()
        try:
            command: Callable[[Sequence[str]], int] = getattr(importlib.import_module(f"octavo.commands.{name}"), name)
            return command(words)
        except KeyboardInterrupt:
            return 130
        except (StartError, ModuleNotFoundError) as error:
            return say_cause(f"octavo {name}", "scheduler", error)

    return run


def _version(words: Sequence[str]) -> int:
    from importlib.metadata import version

    print(f"octavo {version('octavo')}")
    return 0


COMMANDS: Mapping[str, Command] = {
    "serve": Command("serve a model: the whole stack with one command", _serve),
    "chat": Command("chat with a served model in the terminal", _client("chat")),
    "generate": Command("complete a prompt with a served model", _client("generate")),
    "ctl": Command("look into a running scheduler and steer it", _operator("ctl")),
    "top": Command("watch a running scheduler in the terminal", _operator("top")),
    "keys": Command("make, list and revoke API keys", _operator("keys")),
    "bench": Command("measure how a server answers, and compare results", _operator("bench")),
    "plan": Command("tell what to expect of how many replicas, without any", _operator("plan")),
    "replay": Command("make a recorded scheduler's decisions again", _operator("replay")),
    "doctor": Command("check this machine, the installation and a model, or prove that it works", _doctor),
    "router": Command("run one router process", _service("router")),
    "scheduler": Command("run the scheduler process", _service("scheduler")),
    "worker": Command("run one worker process", _service("worker")),
    "version": Command("print the version", _version),
}
