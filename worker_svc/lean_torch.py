"""Imports torch without its rules for tensors that have shapes and no numbers, which only its compiler asks for.

They are a sixth of the import, and a worker compiles nothing by torch. Knows three names inside the versions of torch
that it was tested with; of any other, or where torch has been imported already, nothing is left out.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from importlib.metadata import version
from types import ModuleType

TESTED_VERSIONS = ("2.13.",)

_COMPILERS_OWN = ("torch._meta_registrations", "torch.distributed._meta_registrations")

# What they import and generators of random numbers need: torch makes none before.
_GENERATORS_OWN = "torch._prims.rng_prims"


def import_torch() -> None:
    """Imports torch. Whoever imports what was left out gets it then."""
    # Devices that other packages would bring are none of ours: looking for them reads the metadata of all packages.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    # CUDA's own order is by speed; nvidia-smi's is what checks and metrics number cards by.
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if "torch" in sys.modules or not version("torch").startswith(TESTED_VERSIONS):
        return
    for name in _COMPILERS_OWN:
        sys.modules[name] = ModuleType(name, "Left out by octavo until somebody imports it.")
    try:
        importlib.import_module("torch")
    finally:
        for name in _COMPILERS_OWN:
            del sys.modules[name]
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(_GENERATORS_OWN)
