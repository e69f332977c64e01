"""How the C library's allocator treats this process's memory. Knows glibc; elsewhere it does nothing."""

from __future__ import annotations

import ctypes
import logging

_LOG = logging.getLogger(__name__)

# Numbers of <malloc.h>, and the largest threshold that glibc takes.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MAX_MMAP_THRESHOLD = 32 * 2**20
_KEPT_BYTES = 2**30


def keep_freed_memory() -> None:
    """Lets freed memory be used again instead of going back to the system.

    A step makes and frees the same large tensors as the one before. By default those above a threshold are mapped and
    unmapped each time, and every page of them is faulted in and zeroed anew: 5 ms for the logits of 128 rows.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return
    taken = [mallopt(_M_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD), mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)]
    if not all(taken):
        _LOG.debug("the allocator keeps its own thresholds")


def return_freed_memory() -> None:
    """Gives back what loading took and freed: steps need a small part of it, others may need the rest."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
