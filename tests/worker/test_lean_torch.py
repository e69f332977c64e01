"""What the worker leaves out of torch is left out, can be had later, and changes nothing that the kernels compute."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from kernels.cpu import unavailable_reason
from octavo.phases import Phases
from worker_svc.config import WorkerConfig
from worker_svc.lean_torch import TESTED_VERSIONS
from worker_svc.loading import load

_PROGRAM = """
import os, sys
from worker_svc.lean_torch import import_torch
import_torch()
print(os.environ["CUDA_DEVICE_ORDER"])
from octavo.phases import Phases
from worker_svc.config import WorkerConfig
from worker_svc.loading import load
for kernels in sys.argv[2:]:
    config = WorkerConfig(model=sys.argv[1], kernels=kernels, num_kv_blocks=8, num_threads=1)
    print(load(config, Phases()).hello.model.numerics)
print("torch._decomp.decompositions" in sys.modules, "torch._meta_registrations" in sys.modules)
import torch
import torch._meta_registrations
print(tuple(torch.linalg.inv(torch.empty(3, 3, device="meta")).shape))  # a tensor without numbers
"""


@pytest.mark.skipif(not version("torch").startswith(TESTED_VERSIONS), reason="nothing is left out of this torch")
def test_a_worker_that_leaves_torchs_compiler_out_is_the_same_worker(tiny_directory: Path) -> None:
    kernels = ["reference"] if unavailable_reason() else ["reference", "cpu"]
    command = [sys.executable, "-c", _PROGRAM, str(tiny_directory), *kernels]
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_ORDER"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    model = str(tiny_directory)
    expected = [
        load(WorkerConfig(model=model, kernels=name, num_kv_blocks=8, num_threads=1), Phases()).hello.model.numerics
        for name in kernels
    ]
    assert done.stdout.split("\n") == ["PCI_BUS_ID", *expected, "False False", "(3, 3)", ""]
