"""`octavo doctor`: every check of the registry as a table, and with `--run` proofs that the installation works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.checks import collect
from octavo.checks.collect_host import host_facts, with_tokenizer
from octavo.checks.registry import failures, run_checks, table
from octavo.checks.types import Facts
from octavo.commands import command_line
from octavo.commands.command_line import DoctorConfig
from octavo.commands.doctor_proofs import prove
from octavo.commands.preflight import model_request, router_ports
from octavo.options import OptionError, from_args
from octavo.sizes import format_bytes
from router.config import RouterConfig
from worker_svc.config import WorkerConfig


def doctor(words: Sequence[str]) -> int:
    """Print every finding and proof; 1 when one would stop a start or a proof fails."""
    description = (
        "Check this machine, the installation, the ports and, where MODEL is named, the model. With --run prove the "
        "installation on a tiny random model as well, which takes up to a minute."
    )
    namespace = command_line.parse("doctor", description, words)
    try:
        own = from_args(DoctorConfig, namespace)
        router = from_args(RouterConfig, namespace)
        worker = from_args(WorkerConfig, namespace)
    except OptionError as error:
        command_line.refuse("octavo doctor", [str(error)])
    facts = _facts(router, worker if hasattr(namespace, "model") else None)
    findings = run_checks(facts)
    print("\n".join((*collect.describe(facts.machine), _cache_line(), "", *table(findings))), flush=True)
    status = 1 if failures(findings) else 0
    if own.run:
        print("", flush=True)
        status = max(status, prove())
    return status


def _facts(router: RouterConfig, worker: WorkerConfig | None) -> Facts:
    facts = collect.collect(router_ports(router), None if worker is None else model_request(worker))
    model = None if facts.model is None else with_tokenizer(facts.model)
    return replace(facts, model=model, host=host_facts())


def _cache_line() -> str:
    """What conversions and downloads take of the disk, and that none of it goes away by itself."""
    from octavo.sources import cache_usage

    usage = cache_usage()
    return (
        f"Model cache {usage.root}: {format_bytes(usage.num_bytes)} in {usage.num_files} files; nothing is ever "
        "evicted, delete what is not needed while no model starts"
    )
