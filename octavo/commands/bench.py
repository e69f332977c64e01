"""`octavo bench`: how a server answers, over gRPC or any OpenAI server's HTTP; `octavo bench compare`: two results."""

from __future__ import annotations

import argparse
import asyncio
import platform
import ssl
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from urllib.parse import urlsplit

from octavo.bench import compare as comparing
from octavo.bench.grpc_target import GrpcTarget
from octavo.bench.http import HttpClient, Origin
from octavo.bench.openai_target import OpenAITarget
from octavo.bench.options import BenchConfig
from octavo.bench.plot import svg
from octavo.bench.processes import server_root
from octavo.bench.progress import Progress
from octavo.bench.records import AskError, Target
from octavo.bench.report import Limit, Point, Report, read_report, table
from octavo.bench.sampling import Sampling
from octavo.bench.session import Session
from octavo.bench.workload import Source, Workload, read_source
from octavo.client import Tls
from octavo.commands import command_line
from octavo.machine import usable_cpus
from octavo.options import OptionError, differences, from_args
from octavo.process import StartError


def bench(words: Sequence[str]) -> int:
    """Measure, or compare two results.

    Returns 1 when requests failed, no load keeps the SLO that is searched for, or a result is worse than allowed.
    """
    if words and words[0] == "compare":
        return _compare(words[1:])
    description = "Measure how a server answers. `octavo bench compare A.json B.json` compares two results."
    namespace = command_line.parse("bench", description, words)
    try:
        config = from_args(BenchConfig, namespace)
        source = read_source(config)
    except OptionError as error:
        command_line.refuse("octavo bench", [str(error)])
    return asyncio.run(_measure(config, source))


async def _measure(config: BenchConfig, source: Source) -> int:
    target = await open_target(config)
    points: list[Point] = []
    limit: Limit | None = None
    try:
        workload = await _open_workload(config, source, target)
        root = config.server_pid or server_root(*_place(config.target))
        session = Session(config, target, workload, Progress(sys.stderr), root)
        print(f"{target.label}: {workload.describe()}", flush=True)
        await session.warm_up()
        if config.find_limit is None:
            points = await session.sweep(_say)
        else:
            points, limit = await session.search(_say)
    except AskError as error:
        raise StartError(f"{target.label}: {error}") from None
    finally:
        await target.close()
    report = make_report(config, target.label, workload.describe(), points, limit)
    print("\n".join(("", *table(report.points), *_verdict(config, limit))))
    _write(config, report)
    has_failed = any(run.num_complete < run.num_requests for point in points for run in point.runs)
    return 1 if has_failed or (limit is not None and limit.value is None) else 0


async def open_target(config: BenchConfig) -> Target:
    """The server that the options name, in the running event loop. Raises StartError for one that cannot be asked."""
    sampling = Sampling(config.temperature, config.ignore_eos, config.endpoint == "chat")
    url = config.target if "://" in config.target else f"grpc://{config.target}"
    try:
        scheme = urlsplit(url).scheme
        if scheme in ("grpc", "grpcs"):
            is_secure = scheme == "grpcs" or config.tls_ca is not None
            credentials = Tls(config.tls_ca).credentials() if is_secure else None
            if config.extra_fields:
                raise ValueError("--extra-body is for HTTP")
            return GrpcTarget(urlsplit(url).netloc, config.model, sampling, config.api_key, credentials)
        origin = Origin.parse(url.removesuffix("/").removesuffix("/v1"))
        client = HttpClient(origin, _headers(config), _ssl_context(config))
    except (ValueError, OSError) as error:
        raise StartError(f"{config.target}: {error}") from None
    target = OpenAITarget(client, url, config.model, sampling, config.extra_fields)
    try:
        await target.find_model()
    except AskError as error:
        raise StartError(f"{url}: {error}") from None
    return target


async def _open_workload(config: BenchConfig, source: Source, target: Target) -> Workload:
    try:
        return await Workload.open(config, source, target)
    except ValueError as error:
        raise StartError(f"--prompts {config.prompts}: {error}") from None


def make_report(config: BenchConfig, label: str, workload: str, points: Sequence[Point], limit: Limit | None) -> Report:
    """The report of what was found, now and here."""
    about_output = ("--json ", "--plot ", "TARGET ", "--server-pid ")
    return Report(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=version("octavo"),
        target=label,
        workload=workload,
        options=tuple(line for line in differences(config) if not line.startswith(about_output)),
        machine=f"{platform.system()} {platform.machine()}, {usable_cpus()} CPUs",
        slo=str(config.limits or ""),
        points=tuple(points),
        limit=limit,
    )


def _headers(config: BenchConfig) -> dict[str, str]:
    return {"Authorization": f"Bearer {config.api_key}"} if config.api_key else {}


def _ssl_context(config: BenchConfig) -> ssl.SSLContext | None:
    if config.tls_ca is None:
        return None
    return ssl.create_default_context(cafile=config.tls_ca)


def _place(target: str) -> tuple[str, int]:
    """Host and port of a target; port 0, which nobody listens on, where it names none."""
    parts = urlsplit(target if "://" in target else f"grpc://{target}")
    try:
        return parts.hostname or "", parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
    except ValueError:
        return "", 0


def _say(point: Point) -> None:
    """A line as soon as a load has been measured."""
    ttft, tpot = point.mean("ttft_ms.p50") or 0.0, point.mean("tpot_ms.p50") or 0.0
    within = point.mean("slo_share")
    slo = "" if within is None else f", {within:.1%} within the SLO"
    rate = point.mean("output_tokens_per_s") or 0.0
    print(f"{point.load}: {rate:.1f} output tokens/s, TTFT p50 {ttft:.0f} ms, TPOT p50 {tpot:.1f} ms{slo}", flush=True)


def _verdict(config: BenchConfig, limit: Limit | None) -> list[str]:
    if limit is None:
        return []
    goal = f"{config.slo_share:.0%} of requests within {config.limits}"
    if limit.value is None:
        return ["", f"not even {limit.kind} 1 keeps {goal}"]
    unit = "requests at once" if limit.kind == "concurrency" else "requests/s"
    return ["", f"up to {limit.value:g} {unit} keep {goal}"]


def _write(config: BenchConfig, report: Report) -> None:
    try:
        if config.json is not None:
            Path(config.json).write_text(report.to_json(), encoding="utf-8")
        if config.plot is not None:
            title = f"{report.target}, {report.workload}"
            Path(config.plot).write_text(svg(report.points, title), encoding="utf-8")
    except OSError as error:
        raise StartError(f"{error.filename}: {error.strerror}") from None


def _compare(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="octavo bench compare",
        description="Compare two results of octavo bench at the loads that both have: B against A.",
        allow_abbrev=False,
    )
    parser.add_argument("before", metavar="A.json", type=Path, help="the result to compare with")
    parser.add_argument("after", metavar="B.json", type=Path, help="the result that may be worse")
    parser.add_argument(
        "--fail-if-worse",
        metavar="SHARE",
        type=comparing.parse_share,
        help="exit with 1 when a figure is worse by more than this, such as 5%%",
    )
    given = parser.parse_args(words)
    try:
        before, after = read_report(given.before), read_report(given.after)
        changes = comparing.compare(before, after)
    except (OSError, ValueError) as error:
        command_line.refuse("octavo bench compare", [str(error)])
    print("\n".join((*comparing.unequal(before, after), *comparing.lines(changes, given.fail_if_worse))))
    if given.fail_if_worse is None:
        return 0
    worse = comparing.too_bad(changes, given.fail_if_worse)
    failed = _failed_share(after) > _failed_share(before)
    if failed:
        print(f"more requests failed: {_failed_share(before):.1%} | {_failed_share(after):.1%}")
    print(f"{len(worse)} of {len(changes)} figures are worse by more than {given.fail_if_worse:.1%}")
    return 1 if worse or failed else 0


def _failed_share(report: Report) -> float:
    runs = [run for point in report.points for run in point.runs]
    return sum(run.num_requests - run.num_complete for run in runs) / max(1, sum(run.num_requests for run in runs))
