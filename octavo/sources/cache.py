"""The on-disk cache: where it is, how entries appear in it, and what it remembers of files.

Entries are built beside their final place under a file lock and appear by one rename, so any number of
processes may ask for the same entry at once and none sees half of it. Nothing is ever evicted: a model
that is served no more, or a conversion by an older converter, stays until someone deletes it, which is
safe at any time no start is under way. It knows nothing about models.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from octavo.sources.model_source import SourceError

_log = logging.getLogger(__name__)

_DIGESTS = "digests"


def cache_root(cache_dir: Path | None = None) -> Path:
    """`cache_dir` if given, else $OCTAVO_CACHE, else $XDG_CACHE_HOME/octavo, else ~/.cache/octavo."""
    if cache_dir is not None:
        return cache_dir
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "octavo"
    return Path.home() / ".cache" / "octavo"


@dataclass(frozen=True)
class CacheUsage:
    """What the cache takes of the disk. Nothing in it is ever evicted."""

    root: Path
    num_files: int
    num_bytes: int


def cache_usage(cache_dir: Path | None = None) -> CacheUsage:
    """Count the cache's files, those of older converters too; a cache that is not there has none."""
    root = cache_root(cache_dir)
    sizes = []
    for folder, _, names in os.walk(root):
        for name in names:
            # Another process may publish or clean up meanwhile.
            with suppress(OSError):
                sizes.append((Path(folder) / name).lstat().st_size)
    return CacheUsage(root, len(sizes), sum(sizes))


@contextmanager
def exclusive(lock_path: Path) -> Iterator[None]:
    """Hold an advisory lock shared by all processes; a process that dies releases it."""
    try:
        lock_path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise SourceError(
            f"cache directory {lock_path.parent} cannot be written ({error.strerror}); "
            "set OCTAVO_CACHE to a directory that can"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("waiting for another process to finish %s", lock_path.with_suffix("").name)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def publish(target: Path, build: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> Path:
    """Return `target`, building it first unless it is there and whole.

    `build` gets a path beside the target that does not exist yet and makes a file or a directory there.
    Whatever it raises passes through and leaves nothing behind.
    """
    if is_whole(target):
        return target
    with exclusive(target.parent / f"{target.name}.lock"):
        if is_whole(target):
            return target
        _remove(target)
        for abandoned in target.parent.glob(f".{target.name}.building-*"):
            _remove(abandoned)
        workspace = Path(tempfile.mkdtemp(prefix=f".{target.name}.building-", dir=target.parent))
        try:
            built = workspace / target.name
            build(built)
            _flush_to_disk(built)
            os.rename(built, target)
        finally:
            _remove(workspace)
    return target


def require_free_bytes(directory: Path, num_bytes: int, purpose: str) -> None:
    """Raise `SourceError` when the disk that holds `directory` has no room for `num_bytes`."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        raise SourceError(
            f"{purpose} needs {num_bytes:,} bytes in {directory} and {free:,} are free; "
            "free some, or set OCTAVO_CACHE to a larger disk"
        )


def file_sha256(path: Path, root: Path) -> str:
    """Hex SHA-256 of a file's bytes, read once and then remembered in the cache under `root`.

    The memory is keyed by resolved path, size, modification time and inode: a file replaced or edited
    is read again.
    """
    if (known := remembered_sha256(path, root)) is not None:
        return known
    real = path.resolve()
    key = _identity(real)
    with real.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    # A file that changed while it was read has no digest worth remembering.
    if _identity(real) == key:
        remember_sha256(path, root, digest)
    return digest


def remembered_sha256(path: Path, root: Path) -> str | None:
    """The digest of a file as it is now, if it is already known; the file is not read."""
    key = _identity(path.resolve())
    entry = remembered(root, _DIGESTS, key)
    digest = None if entry is None or entry.get("file") != key else entry.get("sha256")
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def remember_sha256(path: Path, root: Path, digest: str) -> None:
    """Record a digest already known, so that `file_sha256` need not read the file."""
    if remembered_sha256(path, root) is None:
        key = _identity(path.resolve())
        remember(root, _DIGESTS, key, {"file": key, "sha256": digest})


def remembered(root: Path, kind: str, key: str) -> dict[str, object] | None:
    """What was remembered under this key, if anything; the key says all that it depends on."""
    try:
        entry = json.loads(_memory(root, kind, key).read_text())
    except (OSError, ValueError):
        return None
    return entry if isinstance(entry, dict) else None


def remember(root: Path, kind: str, key: str, entry: dict[str, object]) -> None:
    """Keep an entry in the cache under `root`. One that cannot be written only costs the work, so it is a warning."""
    memory = _memory(root, kind, key)
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(dir=memory.parent)
        with os.fdopen(descriptor, "w") as stream:
            json.dump(entry, stream)
        os.replace(draft, memory)
    except OSError as error:
        _log.warning("%s not remembered, to be found out again: %s", memory, error)


def _memory(root: Path, kind: str, key: str) -> Path:
    return root / kind / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _identity(real: Path) -> str:
    status = real.stat()
    return f"{real}\n{status.st_size}\n{status.st_mtime_ns}\n{status.st_ino}"


def _flush_to_disk(path: Path) -> None:
    """Sync every file under `path`: a rename must not outlive the bytes it publishes."""
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
