"""`octavo replay`: a recording repeated, and compared with other options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.cost_model import CostModel
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Request
from scheduler_svc.recorder import Recorder
from scheduler_svc.recording import Recording, RecordingError, frame, read, write
from scheduler_svc.replay import StepSample, limits_of, replay
from scheduler_svc.simulation import Arrival, Simulation, Stay
from scheduler_svc.whatif import fit_costs, workload_of
from tests.scheduler_svc.test_recorder import COSTS, SALT, STAYS, recorded, spec


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "whole"
    path.write_bytes(recorded(3)[0])
    return path


def test_a_recording_is_repeated(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(dump)]) == 0
    told = capsys.readouterr().out
    assert "60 requests" in told
    assert "every decision as recorded" in told
    assert "TTFT p95, ms" in told


def test_a_decision_that_differs_is_named(dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = read(dump.read_bytes())
    found.header.limits["max_num_seqs"] = "1"
    changed = tmp_path / "changed"
    changed.write_bytes(b"".join(write(found.header, [frame(r.SerializeToString()) for r in found.records])))
    assert main(["replay", str(changed)]) == 1
    assert "decided otherwise" in capsys.readouterr().out


def _first(found: Recording, kind: str) -> int:
    return next(index for index, record in enumerate(found.records) if record.HasField(kind))  # type: ignore[arg-type]


def _lose_attach(found: Recording) -> None:
    found.records[_first(found, "attach")].attach.fields["replica_id"] = "99"


def _widen_result(found: Recording) -> None:
    found.records[_first(found, "complete")].complete.num_rows = 2**31


def _add_finish(found: Recording) -> None:
    found.records[_first(found, "complete")].complete.finished_rows.append(0)


def _lengthen_prompt(found: Recording) -> None:
    found.records[_first(found, "submit")].submit.num_prompt_tokens = 2**31


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_lose_attach, r"record \d+ \(plan\) does not fit those before it: .*; the file is damaged"),
        (_widen_result, r"record \d+ \(complete\) does not fit those before it: a result of 2147483648 rows answers"),
        (_add_finish, r"record \d+ \(complete\) does not fit those before it: .*; the file is damaged"),
        (_lengthen_prompt, "a request of 2147483648 tokens, more than a scheduler takes: the file is damaged"),
    ],
)
def test_what_does_not_fit_is_named(damage: Callable[[Recording], None], words: str, dump: Path) -> None:
    found = read(dump.read_bytes())
    damage(found)
    with pytest.raises(RecordingError, match=words):
        replay(found)


def test_other_options_are_compared(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(dump), "--scheduling-policy", "fcfs", "--max-num-seqs", "2"]) == 0
    told = capsys.readouterr().out
    assert "policy fcfs (was priority)" in told
    assert "max_num_seqs 2 (was None)" in told
    head = next(line for line in told.splitlines() if line.split() == ["recorded", "simulated", "changed"])
    ttft = next(line for line in told.splitlines() if line.startswith("TTFT mean"))
    assert head
    _, before, after = map(float, ttft.split()[-3:])
    assert after > before


def test_an_option_with_its_default_counts_when_it_was_given(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(dump), "--max-waiting-requests", "2048"]) == 0
    assert "max_waiting 2048 (was 20)" in capsys.readouterr().out


def test_what_is_simulated_alike_comes_out_alike(dump: Path) -> None:
    found = read(dump.read_bytes())
    again = replay(found)
    workload = workload_of(found, again.sequences)
    same = workload.simulate(limits_of(found), COSTS)
    assert same.num_sequences == 60
    # The recorded run was simulated with these costs, so only cut and refused answers may differ in length.
    recorded_ttft = sorted(t.ttft_ns for t in again.sequences.values() if t.ttft_ns is not None)
    assert same.ttft_p50_ms == pytest.approx(recorded_ttft[len(recorded_ttft) // 2 - 1] / 1e6, rel=0.3)


def test_replicas_come_and_go_as_they_did(dump: Path) -> None:
    stays = workload_of(read(dump.read_bytes()), None).stays
    found = [(stay.spec.replica_id, stay.attach_at_ns, stay.detach_at_ns) for stay in stays]
    assert found == [(stay.spec.replica_id, stay.attach_at_ns, stay.detach_at_ns) for stay in STAYS]


def test_a_resumed_answer_is_as_long_as_it_was() -> None:
    """By its times where they are known, else by its full blocks, prior tokens included."""
    recorder = Recorder(Scheduler(), salt=SALT, max_bytes=1 << 20)
    request = Request(1, "m", [1, 2, 3], 40, prior_token_ids=[4, 5], attempt=2)
    run = Simulation(recorder, COSTS).run([Arrival(0, request, 13)], [Stay(spec(1))])
    found = read(b"".join(recorder.dump(run.end_ns)))
    for times, num_output in ((replay(found).sequences, 13), (None, 13)):  # 16 tokens are four full blocks
        assert [arrival.num_output_tokens for arrival in workload_of(found, times).arrivals] == [num_output]


def test_a_recording_without_its_beginning_needs_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cut"
    path.write_bytes(recorded(3, max_bytes=40_000)[0])
    assert main(["replay", str(path)]) == 1
    assert "use a larger --flight-recorder-size" in capsys.readouterr().err
    assert main(["replay", str(path), "--scheduling-policy", "fair"]) == 1
    assert "give --costs" in capsys.readouterr().err
    found = read(path.read_bytes())
    assert not any(record.HasField("attach") and '"replica-1"' in str(record) for record in found.records)
    assert main(["replay", str(path), "--scheduling-policy", "fair", "--costs", "step_ms=5"]) == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["simulated", "changed"] in told
    num_requests = sum(record.HasField("submit") for record in found.records)
    assert ["sequences", str(num_requests), str(num_requests)] in told
    with pytest.raises(RecordingError, match="holds 0 requests and 0 replicas"):
        workload_of(Recording(type(found.header)(), ()), None)


@pytest.mark.parametrize("words", [[], ["/nonexistent"]])
def test_a_file_is_needed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["replay", *words])
    except SystemExit as left:
        status = int(str(left.code))
    assert status == (1 if words else 2)
    told = capsys.readouterr().err
    assert "octavo replay: " in told
    assert "`octavo ctl dump FILE`" in told


def test_costs_are_fitted_to_steps() -> None:
    costs = CostModel(5000, step_ms=7, row_us=40, kv_token_ns=90)
    shapes = [(0, 1, 10), (0, 8, 900), (300, 0, 0), (100, 4, 200), (0, 20, 5000), (64, 20, 100), (512, 1, 77)]
    steps = [StepSample(p, d, k, 0, costs.step_ns(p, d, k)) for p, d, k in shapes]
    found = fit_costs(steps)
    for name in ("prefill_tokens_per_s", "step_ms", "row_us", "kv_token_ns"):
        assert getattr(found, name) == pytest.approx(getattr(costs, name), rel=1e-3), name


def test_costs_that_steps_do_not_tell_are_not_negative() -> None:
    steps = [StepSample(0, rows, 0, 0, 10_000_000 - rows * 1000) for rows in range(1, 9)]
    found = fit_costs(steps)
    assert found.row_us == 0
    assert found.step_ms == pytest.approx(10, rel=0.01)
    assert fit_costs([StepSample(0, 1, 5, 0, 1_000_000)]).step_ns(0, 1, 5) == pytest.approx(1_000_000, rel=0.01)
    with pytest.raises(RecordingError, match="give --costs"):
        fit_costs([StepSample(1, 1, 1, 0, 0)])
