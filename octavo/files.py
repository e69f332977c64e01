"""Whether a file has changed, without reading it. Knows the file system alone."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Stamp:
    """What changes when a file's content does, also when it is replaced by another of the same size and time."""

    mtime_ns: int
    ctime_ns: int
    size_bytes: int
    inode: int


def stamp_of(path: str | os.PathLike[str]) -> Stamp | None:
    """The file's stamp; None for one that cannot be looked at. Links are followed."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return Stamp(found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino)
