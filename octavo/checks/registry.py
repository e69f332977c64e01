"""The registry: every check there is, in the order in which they are run, shown and documented."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.checks import gpus, host, installation, memory, model, ports, ranks
from octavo.checks.types import PROCESSES, Check, Facts, Finding, Severity

CHECKS: tuple[Check, ...] = (
    *installation.CHECKS,
    *host.CHECKS,
    *ports.CHECKS,
    *model.CHECKS,
    *ranks.CHECKS,
    *gpus.CHECKS,
    *memory.CHECKS,
)


def checks_for(*processes: str) -> tuple[Check, ...]:
    """The checks that concern the start of any of these processes. Raises ValueError for an unknown one."""
    for process in processes:
        if process not in PROCESSES:
            raise ValueError(f"process {process!r} is not one of {', '.join(PROCESSES)}")
    return tuple(check for check in CHECKS if not set(processes).isdisjoint(check.processes))


def run_checks(facts: Facts, checks: Iterable[Check] = CHECKS) -> tuple[Finding, ...]:
    """What the checks find, in order; those with nothing to judge are left out."""
    findings = (check.run(facts) for check in checks)
    return tuple(finding for finding in findings if finding is not None)


def failures(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(finding for finding in findings if finding.severity is Severity.FAILURE)


def warnings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(finding for finding in findings if finding.severity is Severity.WARNING)


def table(findings: Iterable[Finding]) -> list[str]:
    """The lines `octavo doctor` prints: state, check, measured, limit, and below it what to do."""
    rows = tuple(findings)
    titles = {check.id: check.title for check in CHECKS}
    lines = []
    for finding in rows:
        lines.append(f"{finding.severity.value:<8} {finding.check_id:<17} {titles[finding.check_id]}")
        lines.append(f"{'':26} found: {finding.measured}")
        lines.append(f"{'':26} limit: {finding.limit}")
        if finding.remedy:
            lines.append(f"{'':26} do:    {finding.remedy}")
    return lines
