"""`octavo keys`: makes, lists and revokes API keys, and sets tenants' limits, in the file that routers read.

A key is printed once, when it is made, alone on standard output; the file holds its hash. Knows the terminal; what the
file holds is router.access.key_file's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Literal

from octavo.option_parsing import POSITIVE_INT32, number
from octavo.process import StartError
from router.access.key_file import (
    KeyFile,
    KeyFileError,
    PriorityRange,
    TenantLimits,
    change_key_file,
    check_tenant,
    new_key,
    read_key_file,
    record_of,
)

_LIMITS = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")


def keys(words: Sequence[str]) -> int:
    """Do one thing with a key file. Raises StartError, with the cause, when it cannot be done."""
    namespace = _parser().parse_args(words)
    run: Callable[[argparse.Namespace], int] = namespace.run
    try:
        return run(namespace)
    except (KeyFileError, ValueError) as error:
        raise StartError(str(error)) from None


def _parser() -> argparse.ArgumentParser:
    description = "Make, list and revoke the API keys of a file; routers that serve with it follow within seconds."
    parser = argparse.ArgumentParser(prog="octavo keys", description=description, allow_abbrev=False)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, help: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        added.add_argument("--key-file", required=True, metavar="FILE", help="The file, as routers are given it.")
        added.set_defaults(run=run)
        return added

    create = command("create", "Make a key, print it once, and add its hash to the file.", _create)
    create.add_argument(
        "--tenant", required=True, metavar="NAME", help="Whom it stands for; a tenant may have several."
    )
    create.add_argument(
        "--priority-range",
        type=_priority_range,
        default=PriorityRange.parse("0.."),
        metavar="BEST..WORST",
        help="Priorities it may ask for, the smaller the better: 0.. (the default), -5..10, or .. for all.",
    )
    command("list", "List the keys, without anything that could be used as one.", _list)
    revoke = command("revoke", "Remove a key.", _revoke)
    revoke.add_argument("id", metavar="ID", help="Its id, as `octavo keys list` shows it.")
    limit = command("limit", "Set what a tenant may use of each router; what is not named stays.", _limit)
    limit.add_argument("tenant", metavar="TENANT")
    for name in _LIMITS:
        limit.add_argument(
            f"--{name.replace('_', '-')}", dest=name, type=_limit_value, metavar="N", help="A number, or none."
        )
    return parser


def _create(namespace: argparse.Namespace) -> int:
    key = new_key()
    created = datetime.now(UTC).strftime("%Y-%m-%d")
    record = record_of(key, namespace.tenant, namespace.priority_range, created)
    change_key_file(namespace.key_file, lambda file: replace(file, keys=(*file.keys, record)))
    print(
        f"key {record.id} of tenant {record.tenant}, priorities {record.priorities}; it is shown this once:",
        file=sys.stderr,
        flush=True,
    )
    print(key)
    return 0


def _list(namespace: argparse.Namespace) -> int:
    file = read_key_file(namespace.key_file)
    print(f"{'id':<14}{'tenant':<20}{'priorities':<14}{'created':<12}limits of the tenant")
    for record in file.keys:
        limits = file.tenants.get(record.tenant, TenantLimits())
        shown = ", ".join(f"{name} {value}" for name in _LIMITS if (value := getattr(limits, name)) is not None)
        print(f"{record.id:<14}{record.tenant:<20}{record.priorities!s:<14}{record.created:<12}{shown}".rstrip())
    return 0


def _revoke(namespace: argparse.Namespace) -> int:
    change_key_file(namespace.key_file, lambda file: file.without(namespace.id))
    print(f"key {namespace.id} is revoked")
    return 0


def _limit(namespace: argparse.Namespace) -> int:
    tenant = check_tenant(namespace.tenant)
    given = {name: value for name in _LIMITS if (value := getattr(namespace, name)) is not None}
    if not given:
        raise ValueError(f"no limit is named; give one of {', '.join('--' + n.replace('_', '-') for n in _LIMITS)}")
    changes = {name: None if value == "none" else value for name, value in given.items()}

    def change(file: KeyFile) -> KeyFile:
        limits = replace(file.tenants.get(tenant, TenantLimits()), **changes)
        return replace(file, tenants={**file.tenants, tenant: limits})

    limits = change_key_file(namespace.key_file, change).tenants[tenant]
    shown = [f"{name} {'none' if getattr(limits, name) is None else getattr(limits, name)}" for name in _LIMITS]
    print(f"{tenant}: {', '.join(shown)}")
    return 0


def _priority_range(text: str) -> PriorityRange:
    try:
        return PriorityRange.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _limit_value(text: str) -> int | Literal["none"]:
    if text == "none":
        return "none"
    return number(int, POSITIVE_INT32)(text)
