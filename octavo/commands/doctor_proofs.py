"""The proofs of `octavo doctor --run`: which there are, run one after the other, a line each.

What is proved lies where it belongs: kernels/proofs.py, scheduler_svc/proofs.py, and doctor_stack.py for all together.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_OWN_PACKAGES = ("octavo", "router", "scheduler_svc", "worker_svc", "kernels")


@dataclass(frozen=True)
class Proof:
    """One thing to prove: the function that returns what it found, or raises what is wrong."""

    id: str
    module: str
    function: str

    def run(self) -> str:
        """Import it now: what is not installed is then said of this proof alone."""
        prove_it: Callable[[], str] = getattr(importlib.import_module(self.module), self.function)
        return prove_it()


PROOFS: tuple[Proof, ...] = (
    Proof("kernels", "kernels.proofs", "prove_kernels"),
    Proof("sampler", "kernels.proofs", "prove_sampler"),
    Proof("cache", "kernels.proofs", "prove_cache"),
    Proof("scheduler", "scheduler_svc.proofs", "prove_laws"),
    Proof("stack", "octavo.commands.doctor_stack", "prove_stack"),
)


def prove(proofs: Sequence[Proof] = PROOFS) -> int:
    """Run the proofs and print a line for each; 1 when one fails. One whose packages are absent proves nothing."""
    status = 0
    for proof in proofs:
        begun_s = time.monotonic()
        try:
            state, words = "proved", proof.run()
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] in _OWN_PACKAGES:
                raise
            state, words = "absent", f"{error.name} is not installed, so this part cannot run here"
        except Exception as error:
            name = "" if type(error) is AssertionError else f"{type(error).__name__}: "
            state, words = "FAILED", f"{name}{error}"
            status = 1
        print(f"{state:<8} {proof.id:<10} {words} ({time.monotonic() - begun_s:.1f} s)", flush=True)
    return status
