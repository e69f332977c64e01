"""Every check is provoked: what it finds on sound facts, and on facts with the one thing wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.checks import docs
from octavo.checks.installation import in_range
from octavo.checks.registry import CHECKS, checks_for, failures, run_checks, table, warnings
from octavo.checks.types import (
    DirectoryFacts,
    Facts,
    Finding,
    HostFacts,
    KernelFacts,
    ModelFacts,
    PackageFacts,
    PortFacts,
    Severity,
    TokenizerFacts,
)
from octavo.commands.preflight import enforce
from octavo.machine import MachineFacts
from octavo.memory import KvPool, MemoryPrediction
from octavo.process import StartError
from octavo.sharding import DividedSizes
from tests.checks.gpu_provocations import GPU_PROVOKED

GIB = 2**30
PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"

MACHINE = MachineFacts(
    system="Linux",
    architecture="x86_64",
    num_cpus=2,
    total_memory_bytes=8 * GIB,
    free_memory_bytes=6 * GIB,
    cpu_flags=frozenset({"avx2", "avx512_bf16"}),
    python_version=(3, 12, 1),
    compiler="/usr/bin/c++",
)
MODEL = ModelFacts(
    name="m",
    directory="/models/m",
    missing=None,
    file_problems=(),
    dtype="bfloat16",
    model_limit_tokens=8192,
    max_model_len_tokens=8192,
    memory=MemoryPrediction(GIB // 4, 2 * GIB, 2 * GIB, GIB // 4),
    kv_pool=KvPool(1024, 16, 2 * 2**20, "--num-kv-blocks"),
    tokenizer=TokenizerFacts(1000, 999, 1024, None),
)
PORT = PortFacts("--http-port", "127.0.0.1", 8000, False, None, None)
HOST = HostFacts(4, 2.0, DirectoryFacts("/dev/shm", True, 2 * GIB), DirectoryFacts("/cache", True, 9 * GIB))
SOUND = Facts(MACHINE, (PackageFacts("grpcio", "1.85.3", ">=1.80,<2"),), KernelFacts(True, None), (PORT,), MODEL, HOST)


def with_machine(**values: object) -> Facts:
    return replace(SOUND, machine=replace(MACHINE, **values))  # type: ignore[arg-type]


def with_model(**values: object) -> Facts:
    return replace(SOUND, model=replace(MODEL, **values))  # type: ignore[arg-type]


def with_host(**values: object) -> Facts:
    return replace(SOUND, host=replace(HOST, **values))  # type: ignore[arg-type]


def with_port(**values: object) -> Facts:
    return replace(SOUND, ports=(PORT, replace(PORT, **values)))  # type: ignore[arg-type]


NO_KERNELS = replace(SOUND, kernels=KernelFacts(False, "building\nerror: no <immintrin.h>\n"))
BARE = replace(NO_KERNELS, machine=replace(MACHINE, compiler=None))
SMALL_POOL = KvPool(100, 16, 2 * 2**20, "--kv-cache-memory")

PROVOKED: dict[str, tuple[Facts, Severity, str, str]] = {
    "python-version": (with_machine(python_version=(3, 10, 9)), Severity.FAILURE, "3.10.9", "Python 3.11"),
    "package-versions": (
        replace(SOUND, packages=(PackageFacts("grpcio", "1.79.1", ">=1.80,<2"),)),
        Severity.WARNING,
        "grpcio 1.79.1",
        "pip install 'grpcio>=1.80,<2'",
    ),
    "cpu-kernels": (NO_KERNELS, Severity.WARNING, "error: no <immintrin.h>", "install octavo again"),
    "compiler": (BARE, Severity.WARNING, "no c++", "apt install g++"),
    "cpu-instructions": (
        with_machine(cpu_flags=frozenset({"sse4_2", "amx_bf16"})),
        Severity.WARNING,
        "no AVX2",
        "-cpu host",
    ),
    "cpu-count": (
        with_machine(num_cpus=1),
        Severity.WARNING,
        "1 of 4 CPUs usable, a control group allows 2",
        "--cpus",
    ),
    "shared-memory": (
        replace(
            with_host(shared_memory=DirectoryFacts("/dev/shm", True, 64 * 2**20)),
            model=replace(MODEL, num_ranks=2, num_local_ranks=2),
        ),
        Severity.WARNING,
        "/dev/shm: 64.00 MiB free",
        "--shm-size",
    ),
    "cache-directory": (
        with_host(cache=DirectoryFacts("/cache", False, 9 * GIB)),
        Severity.WARNING,
        "/cache: 9.00 GiB free, and it cannot be written",
        "OCTAVO_CACHE",
    ),
    "tokenizer": (
        with_model(tokenizer=TokenizerFacts(1000, 1024, 1024, None)),
        Severity.FAILURE,
        "the highest id 1024; 1024 rows",
        "does not belong to these weights",
    ),
    "ports": (
        with_port(in_use=True, owner="nginx (pid 7)"),
        Severity.FAILURE,
        "127.0.0.1:8000 (--http-port) is taken by nginx (pid 7)",
        "choose another port with --http-port",
    ),
    "addresses": (
        with_port(host="192.0.2.1", error="Cannot assign requested address"),
        Severity.FAILURE,
        "192.0.2.1:8000 (--http-port): Cannot assign",
        "0.0.0.0",
    ),
    "model-found": (
        with_model(missing="no file or directory at /m", directory=None),
        Severity.FAILURE,
        "no file or directory at /m",
        "spelling",
    ),
    "model-files": (
        with_model(file_problems=tuple(f"/m/{n}: truncated: expected 10 bytes, has 9" for n in range(7))),
        Severity.FAILURE,
        "expected 10 bytes, has 9; and 2 more",
        "/models/m",
    ),
    "cpu-precision": (
        with_machine(cpu_flags=frozenset({"avx2"})),
        Severity.WARNING,
        "no bf16 instructions",
        "--dtype float32",
    ),
    "context-length": (
        with_model(max_model_len_tokens=9000),
        Severity.FAILURE,
        "--max-model-len 9000",
        "--max-model-len 8192",
    ),
    "ranks-devices": (
        with_model(num_ranks=4, num_local_ranks=3),
        Severity.FAILURE,
        "3 of 4 ranks on this machine",
        "--tensor-parallel-size 2 or less",
    ),
    "ranks-sizes": (
        with_model(num_ranks=2, num_local_ranks=2, divided_sizes=DividedSizes(9, 3, 1537, 1000)),
        Severity.FAILURE,
        "intermediate_size 1537 is not a multiple of 2",
        "--tensor-parallel-size with one of 1",
    ),
    "memory": (
        with_machine(free_memory_bytes=4 * GIB),
        Severity.FAILURE,
        "4.50 GiB needed: weights 2.00 GiB, KV cache 2.00 GiB",
        "--kv-cache-memory 1536MiB or less",
    ),
    "kv-cache": (
        with_model(kv_pool=SMALL_POOL),
        Severity.WARNING,
        "100 KV blocks of 16: 1600 tokens",
        "--kv-cache-memory 1024MiB, or --max-model-len 1600",
    ),
}


def test_one_rank_needs_no_shared_memory() -> None:
    facts = with_host(shared_memory=DirectoryFacts("/dev/shm", False, 0))
    (finding,) = (finding for finding in run_checks(facts) if finding.check_id == "shared-memory")
    assert finding.severity is Severity.OK


def test_a_tokenizer_that_cannot_be_read_is_a_failure() -> None:
    facts = with_model(tokenizer=TokenizerFacts(0, 0, 0, "/models/m/tokenizer.json: not JSON"))
    (finding,) = failures(run_checks(facts))
    assert finding.measured == "/models/m/tokenizer.json: not JSON"
    assert "/models/m" in finding.remedy


def test_a_process_is_checked_for_what_concerns_it() -> None:
    facts = replace(BARE, model=None)
    assert {finding.check_id for finding in warnings(run_checks(facts, checks_for("worker")))} == {
        "cpu-kernels",
        "compiler",
    }
    for name in ("router", "scheduler"):
        assert warnings(run_checks(facts, checks_for(name))) == ()
        assert "ports" in {finding.check_id for finding in run_checks(facts, checks_for(name))}
    with pytest.raises(ValueError, match="process 'cook'"):
        checks_for("cook")


def test_each_check_has_a_provocation() -> None:
    assert {*PROVOKED, *GPU_PROVOKED} == {check.id for check in CHECKS}
    assert len(CHECKS) == len(PROVOKED) + len(GPU_PROVOKED)


def test_on_sound_facts_nothing_is_wrong() -> None:
    assert [finding for finding in run_checks(SOUND) if finding.severity is not Severity.OK] == []


@pytest.mark.parametrize("check_id", PROVOKED)
def test_a_provoked_check_says_what_it_measured_and_what_to_do(check_id: str) -> None:
    facts, severity, measured, remedy = PROVOKED[check_id]
    (finding,) = (finding for finding in run_checks(facts) if finding.check_id == check_id)
    assert finding.severity is severity
    assert measured in finding.measured
    assert remedy in finding.remedy
    assert finding.limit


@pytest.mark.parametrize("check_id", sorted(set(PROVOKED) - {"compiler"}))
def test_a_provocation_provokes_that_check_alone(check_id: str) -> None:
    wrong = [finding for finding in run_checks(PROVOKED[check_id][0]) if finding.severity is not Severity.OK]
    assert [finding.check_id for finding in wrong] == [check_id]


def test_memory_that_weights_alone_exceed_is_not_mended_by_a_smaller_cache() -> None:
    facts = with_machine(free_memory_bytes=GIB)
    (finding,) = failures(run_checks(facts))
    assert finding.remedy.startswith("Free 1.50 GiB or more")


def test_all_replicas_of_a_stack_must_fit() -> None:
    """Each takes 4.5 GiB, of which 2 GiB are its cache."""
    assert not failures(run_checks(replace(with_model(num_replicas=1), machine=MACHINE)))
    (finding,) = failures(run_checks(with_model(num_replicas=2)))
    assert "9.00 GiB needed by 2 replicas" in finding.measured
    assert "--kv-cache-memory 512MiB or less" in finding.remedy
    (finding,) = failures(run_checks(with_model(num_replicas=3)))
    assert "--data-parallel-size 1" in finding.remedy


def test_uneven_ranks_are_warned_about_and_even_ones_named() -> None:
    (finding,) = warnings(
        run_checks(with_model(num_ranks=2, num_local_ranks=2, divided_sizes=DividedSizes(9, 3, 1536, 1000)))
    )
    assert "2 ranks of 3 to 6 query heads: 3 KV heads" in finding.measured
    assert finding.remedy.endswith("--tensor-parallel-size 3")
    assert not warnings(
        run_checks(with_model(num_ranks=2, num_local_ranks=2, divided_sizes=DividedSizes(8, 1, 1536, 1000)))
    )


def test_the_memory_of_ranks_is_divided_among_them() -> None:
    facts = with_model(num_ranks=2, num_local_ranks=2)
    (finding,) = failures(run_checks(replace(facts, machine=replace(MACHINE, free_memory_bytes=4 * GIB))))
    assert "for 2 ranks together" in finding.measured
    assert "--kv-cache-memory 768MiB or less" in finding.remedy


def test_a_cache_without_a_block_stops_the_start() -> None:
    facts = with_model(kv_pool=replace(SMALL_POOL, num_blocks=0))
    (finding,) = failures(run_checks(facts))
    assert finding.check_id == "kv-cache"


def test_fp16_on_a_cpu_is_warned_about_and_float32_never() -> None:
    assert [finding.check_id for finding in warnings(run_checks(with_model(dtype="float16")))] == ["cpu-precision"]
    assert not warnings(
        run_checks(replace(with_model(dtype="float32"), machine=replace(MACHINE, cpu_flags=frozenset({"avx2"}))))
    )


def test_what_was_not_asked_for_is_not_judged() -> None:
    findings = run_checks(Facts(MACHINE, (), None, (), None))
    assert [finding.check_id for finding in findings] == ["python-version"]


@pytest.mark.parametrize(
    ("version", "tested_range", "inside"),
    [
        ("1.80", ">=1.80,<2", True),
        ("1.80.0", "==1.80", True),
        ("1.79.9", ">=1.80,<2", False),
        ("2.0", ">=1.80,<2", False),
        ("2.13.0+cpu", ">=2.9", True),
        ("2.0.0rc1", "!=2.0.0", False),
        ("10.2", ">9,<=10.2", True),
        ("3", "", True),
    ],
)
def test_versions_are_compared_by_number(version: str, tested_range: str, inside: bool) -> None:
    assert in_range(version, tested_range) is inside


def test_a_bound_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(ValueError, match="~=1"):
        in_range("1", "~=1")


def test_the_first_failure_ends_the_start_and_the_rest_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    findings = [
        Finding("a", Severity.WARNING, "1", "2", "Mend a"),
        Finding("b", Severity.FAILURE, "3", "at most 2", "Mend b"),
        Finding("c", Severity.FAILURE, "4", "at most 2", "Mend c"),
    ]
    with pytest.raises(StartError, match=r"^b: 3; at most 2. Mend b$"):
        enforce(findings)
    assert caplog.messages == ["check a: 1; 2. Mend a", "check c: 4; at most 2. Mend c"]
    enforce(findings[:1])


def test_the_table_shows_state_value_limit_and_remedy() -> None:
    lines = table([Finding("ports", Severity.FAILURE, "taken", "free", "Stop it")])
    assert lines[0].split(maxsplit=2) == ["failure", "ports", "The ports are free"]
    assert [line.split(maxsplit=1)[1] for line in lines[1:]] == ["taken", "free", "Stop it"]


def test_the_manual_is_generated_from_the_registry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docs.main(["--check", str(PAGE)]) == 0, capsys.readouterr().err
    page = tmp_path / "page.md"
    assert docs.main(["--check", str(page)]) == 1
    assert "out of date" in capsys.readouterr().err
    assert docs.main([str(page)]) == 0
    assert docs.main(["--check", str(page)]) == 0
    assert all(f"## {check.id}\n" in page.read_text(encoding="utf-8") for check in CHECKS)
