"""`octavo doctor --run`: each proof holds here, says what it found, and fails where something is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.api import Backend, Samples, SamplingBatch
from kernels.proofs import prove_cache, prove_kernels, prove_sampler
from kernels.reference import ReferenceBackend
from octavo.commands.doctor_model import write_tiny_model
from octavo.commands.doctor_proofs import PROOFS, Proof, prove
from octavo.sources import inspect_files, resolve
from scheduler_svc.core.laws import LawBroken
from scheduler_svc.core.limits import CoreLimits
from scheduler_svc.core.plan import StepResult
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.types import Event
from scheduler_svc.proofs import prove_laws


@pytest.mark.parametrize("proof", [proof for proof in PROOFS if proof.id != "stack"], ids=lambda proof: proof.id)
def test_a_proof_holds_and_says_what_it_looked_at(proof: Proof, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove([proof]) == 0
    assert re.fullmatch(rf"proved   {proof.id} +\S.* \(\d+\.\d s\)\n", capsys.readouterr().out)


class Wrong(ReferenceBackend):
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return super().silu_mul(gate_up) + 1e-3


class Drifting(ReferenceBackend):
    """What attention gives depends on how many tokens run at once."""

    def attention(self, qkv: Tensor, *others: Any) -> Tensor:
        return super().attention(qkv, *others) + 1e-7 * len(qkv)


class Biased(ReferenceBackend):
    def sample(self, logits: Tensor, batch: SamplingBatch) -> Samples:
        return super().sample(logits + torch.arange(logits.shape[1]), batch)


class Forgetful(ReferenceBackend):
    def copy_blocks(self, *blocks: object) -> None:
        pass


@pytest.mark.parametrize(
    ("backend", "run", "words"),
    [
        (Wrong, prove_kernels, "silu_mul differs from the reference by 0.00"),
        (Drifting, prove_kernels, "depends on how a prompt is cut"),
        (Biased, prove_sampler, r"row \d+: token 99\d, the reference chose"),
        (Forgetful, prove_cache, "do not hold what was written"),
    ],
)
def test_a_kernel_that_computes_something_else_is_found(
    backend: type[ReferenceBackend], run: Callable[[Backend], str], words: str
) -> None:
    with pytest.raises(AssertionError, match=words):
        run(backend())


def test_a_broken_law_is_found() -> None:
    class Leaking(Scheduler):
        """Takes a reference too many after each step."""

        def complete(self, replica_id: int, result: StepResult, now: int) -> list[Event]:
            events = super().complete(replica_id, result, now)
            self.replicas[replica_id].kv.pool.holds[0] += 1
            return events

    with pytest.raises(LawBroken, match="references equal tables: block 0 of 'replica-"):
        prove_laws(Leaking(CoreLimits()))


def test_what_fails_and_what_is_absent_is_said_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made_up_proofs.py").write_text(
        "def wrong():\n    raise AssertionError('1 is not 2')\n"
        "def broken():\n    return [][0]\n"
        "def absent():\n    import a_package_that_is_nowhere\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    proofs = [Proof(name, "made_up_proofs", name) for name in ("wrong", "broken", "absent")]
    assert prove(proofs) == 1
    wrong, broken, absent = capsys.readouterr().out.splitlines()
    assert wrong.startswith("FAILED   wrong      1 is not 2 (")
    assert broken.startswith("FAILED   broken     IndexError: list index")
    assert absent.startswith("absent   absent     a_package_that_is_nowhere is not installed")
    assert prove(proofs[2:]) == 0


def test_the_tiny_model_is_whole_and_the_same_each_time(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = write_tiny_model(tmp_path / "a"), write_tiny_model(tmp_path / "b")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert list(inspect_files(resolve(str(first)))) == []
