"""The reference backend: every kernel in plain torch, obvious first, batch invariant on CPU all the same."""

from kernels.reference.backend import ReferenceBackend

__all__ = ["ReferenceBackend"]
