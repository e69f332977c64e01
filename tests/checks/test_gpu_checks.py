"""GPUs: what is found of them through an NVML that is not there, and what each check says of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.checks import gpus
from octavo.checks.registry import failures, run_checks
from octavo.checks.types import Facts, Finding, Severity
from octavo.gpus import Card, CardFacts, CardLink, CudaSoftware, collect_gpus
from tests.checks.gpu_provocations import GPU_PROVOKED, on_cards
from tests.fakes.fake_gpus import GIB, H100, SOFTWARE, USED, FakeCard, FakeNvml, inventory


def found(facts: Facts, check_id: str) -> Finding:
    (finding,) = (finding for finding in run_checks(facts, gpus.CHECKS) if finding.check_id == check_id)
    return finding


def test_each_gpu_check_has_a_provocation() -> None:
    assert set(GPU_PROVOKED) == {check.id for check in gpus.CHECKS}


@pytest.mark.parametrize("check_id", GPU_PROVOKED)
def test_a_provoked_check_says_what_it_measured_and_what_to_do(check_id: str) -> None:
    facts, severity, measured, remedy = GPU_PROVOKED[check_id]
    finding = found(facts, check_id)
    assert finding.severity is severity
    assert measured in finding.measured
    assert remedy in finding.remedy
    others = [each for each in run_checks(facts) if each.severity is not Severity.OK and each.check_id != check_id]
    assert others == []


def test_two_good_cards_are_sound() -> None:
    link = CardLink(0, 1, "NVLink", True)
    facts = on_cards(inventory(H100, H100, links=(link,)), num_ranks=2)
    findings = run_checks(facts, gpus.CHECKS)
    assert [finding.severity for finding in findings] == [Severity.OK] * len(findings)
    assert {finding.check_id for finding in findings} == {check.id for check in gpus.CHECKS} - {"gpu-slices"}


@pytest.mark.parametrize(
    ("changes", "measured", "remedy"),
    [
        ({"software": CudaSoftware("2.13.0+cpu", None, None, None)}, "torch 2.13.0+cpu is a CPU build", "CUDA index"),
        ({"visible_devices": ""}, "CUDA_VISIBLE_DEVICES is ''", "Unset it"),
        ({"has_device_files": False, "in_container": True, "nvml_problem": "x"}, "given no GPU", "--gpus all"),
        (
            {"has_device_files": False, "has_kernel_driver": False, "nvml_problem": "x"},
            "no NVIDIA driver",
            "nvidia-smi",
        ),
        ({"has_driver_library": False, "nvml_problem": "x"}, "libcuda.so.1 is not found", "DRIVER_CAPABILITIES"),
    ],
)
def test_why_no_gpu_can_be_used(changes: dict[str, object], measured: str, remedy: str) -> None:
    finding = found(on_cards(inventory(**changes), device="cuda"), "gpu-visible")
    assert (finding.severity, measured in finding.measured, remedy in finding.remedy) == (Severity.FAILURE, True, True)
    assert "--device cpu" in finding.remedy


def test_each_visible_card_is_shown_with_its_free_memory_and_who_holds_the_rest() -> None:
    busy = replace(H100, free_bytes=20 * GIB, users=(USED,))
    measured = found(on_cards(inventory(H100, busy)), "gpu-visible").measured
    first, second = "NVIDIA H100, 78.00 GiB of 80.00 GiB free", "NVIDIA H100, 20.00 GiB of 80.00 GiB free"
    assert measured == f"2 visible: {first}, {second} (pid 77 60.00 GiB)"


def test_without_nvml_a_start_goes_on_unchecked() -> None:
    finding = found(on_cards(inventory(nvml_problem="nvidia-ml-py is not installed")), "gpu-visible")
    assert finding.severity is Severity.WARNING
    assert "octavo[nvml]" in finding.remedy


def test_the_cpu_is_taken_where_it_is_asked_for_or_there_is_no_gpu() -> None:
    nothing = inventory(has_device_files=False, has_kernel_driver=False, has_driver_library=False)
    assert run_checks(on_cards(nothing), gpus.CHECKS) == ()
    assert run_checks(on_cards(inventory(H100), device="cpu"), gpus.CHECKS) == ()
    assert failures(run_checks(on_cards(nothing, device="cuda"), gpus.CHECKS)) != ()


def test_a_card_without_fp8_keeps_no_fp8_cache() -> None:
    a100 = inventory(replace(H100, name="A100", architecture=80))
    assert found(on_cards(a100), "gpu-architecture").severity is Severity.OK
    finding = found(on_cards(a100, kv_cache_dtype="fp8_e4m3"), "gpu-architecture")
    assert finding.severity is Severity.FAILURE
    assert "8.9 or later, which a KV cache in fp8_e4m3 needs" in finding.limit
    assert "--kv-cache-dtype auto" in finding.remedy


def test_a_share_that_is_too_small_is_named() -> None:
    facts = on_cards(inventory(H100), utilization=0.02)
    assert "Use --gpu-memory-utilization 0.08" in found(facts, "gpu-memory").remedy


def test_cards_are_counted_from_the_first_that_was_named() -> None:
    finding = found(on_cards(inventory(H100, H100), device="cuda:1", num_ranks=2), "gpu-visible")
    assert finding.severity is Severity.FAILURE
    assert CardFacts(inventory(H100, replace(H100, uuid="b")), "cuda:1").used[0].uuid == "b"


def test_what_nvml_reports_is_taken_in(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    busy = replace(H100, uuid="GPU-2f31", free_bytes=20 * GIB, users=(USED,), architecture=89)
    nvml = FakeNvml([FakeCard(H100, frozenset({1}), joined=frozenset({1})), FakeCard(busy), FakeCard(H100)])
    whole = collect_gpus({}, tmp_path, nvml)
    assert whole.cards == (H100, busy, H100)
    assert [(link.first, link.second, link.kind, link.has_p2p) for link in whole.links] == [
        (0, 1, "NVLink", True),
        (0, 2, "several PCIe switches", False),
        (1, 2, "several PCIe switches", False),
    ]
    assert (whole.has_device_files, whole.has_kernel_driver, whole.in_container) == (True, False, False)
    assert (whole.software.driver_version, whole.software.driver_cuda) == ("580.65", (13, 0))
    chosen = collect_gpus({"CUDA_VISIBLE_DEVICES": "GPU-2f31, 0"}, tmp_path, nvml)
    assert [card.uuid for card in chosen.cards] == ["GPU-2f31", "GPU-1"]
    # As CUDA does: a UUID may be cut short, and what follows a card that is not there is not seen.
    assert collect_gpus({"CUDA_VISIBLE_DEVICES": "GPU-2f"}, tmp_path, nvml).cards == (busy,)
    assert collect_gpus({"CUDA_VISIBLE_DEVICES": "GPU-"}, tmp_path, nvml).cards == ()
    assert [c.uuid for c in collect_gpus({"CUDA_VISIBLE_DEVICES": "0,9,1"}, tmp_path, nvml).cards] == ["GPU-1"]
    assert collect_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path, nvml).cards == ()


def test_a_slice_is_found_by_its_uuid(tmp_path: Path) -> None:
    part = Card("MIG-1", "H100 MIG 1g.10gb", 90, 10 * GIB, 9 * GIB, is_slice=True)
    nvml = FakeNvml([FakeCard(replace(H100, is_divided=True)), FakeCard(part)])
    assert collect_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1"}, tmp_path, nvml).cards == (part,)


def test_a_process_is_shown_one_slice() -> None:
    part = Card("MIG-1", "H100 MIG 1g.10gb", 90, 10 * GIB, 9 * GIB, is_slice=True)
    assert found(on_cards(inventory(part)), "gpu-slices").severity is Severity.OK
    two = on_cards(inventory(part, replace(part, uuid="MIG-2")))
    assert two.cards is not None
    finding = found(replace(two, cards=replace(two.cards, num_devices=2)), "gpu-slices")
    assert finding.severity is Severity.FAILURE
    assert "start a worker of one rank for each slice" in finding.remedy


def test_an_nvml_without_driver_says_why(tmp_path: Path) -> None:
    silent = collect_gpus({}, tmp_path, FakeNvml(is_broken=True))
    assert (silent.cards, silent.nvml_problem) == ((), "Driver Not Loaded")
    assert not silent.has_signs
    assert silent.software.torch_version is not None
    assert SOFTWARE.torch_cuda is not None
