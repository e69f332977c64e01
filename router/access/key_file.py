"""The file of API keys: their hashes with whom they belong to, and what each tenant may use. Read and written as JSON.

    {"keys": [{"id": "5f0c9a1e", "sha256": "…", "tenant": "acme", "priority_range": "0..", "created": "2025-01-31"}],
     "tenants": {"acme": {"requests_per_minute": 600, "tokens_per_minute": 90000, "max_concurrent_requests": 32}}}

A key is 256 random bits, so one round of SHA-256 hides it: nobody can try that many, and a slow hash would only let
strangers make the router work. Knows files and values; knows no request.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from octavo.integers import INT32_MAX, INT32_MIN

KEY_PREFIX = "octavo-"
PRIORITY_MIN, PRIORITY_MAX = INT32_MIN, INT32_MAX

_ID_CHARS = 12
_MOST_BYTES = 16 * 2**20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_RANGE = re.compile(r"(-?[0-9]{1,10})?\.\.(-?[0-9]{1,10})?")


class KeyFileError(Exception):
    """The file cannot be used. The message names it and what is wrong, and holds no key and no hash."""


@dataclass(frozen=True)
class PriorityRange:
    """The priorities a key may ask for, both ends included; a smaller number is served first."""

    best: int = 0
    worst: int = PRIORITY_MAX

    def __post_init__(self) -> None:
        if not PRIORITY_MIN <= self.best <= self.worst <= PRIORITY_MAX:
            raise ValueError(
                f"priority range {self.best}..{self.worst} must rise inside [{PRIORITY_MIN}, {PRIORITY_MAX}]"
            )

    @classmethod
    def parse(cls, text: str) -> PriorityRange:
        """From `0..`, `-5..10` or `..`, where an end left out is the last there is. Raises ValueError."""
        match = _RANGE.fullmatch(text)
        if match is None:
            raise ValueError(f"priority range {text!r} is not BEST..WORST, such as 0.. or -5..10")
        best, worst = match.groups()
        return cls(PRIORITY_MIN if best is None else int(best), PRIORITY_MAX if worst is None else int(worst))

    def __str__(self) -> str:
        best = "" if self.best == PRIORITY_MIN else str(self.best)
        return f"{best}..{'' if self.worst == PRIORITY_MAX else self.worst}"


ANY_PRIORITY = PriorityRange(PRIORITY_MIN, PRIORITY_MAX)


@dataclass(frozen=True)
class TenantLimits:
    """What one tenant may use of one router; None: no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent_requests: int | None = None

    def over(self, base: TenantLimits) -> TenantLimits:
        """These limits, with those of `base` where there is none here."""
        return replace(base, **{name: value for name, value in asdict(self).items() if value is not None})


@dataclass(frozen=True)
class KeyRecord:
    """What is kept of a key. `sha256` is hexadecimal."""

    id: str
    sha256: str = field(repr=False)
    tenant: str = ""
    priorities: PriorityRange = PriorityRange()
    created: str = ""


@dataclass(frozen=True)
class KeyFile:
    """The whole file."""

    keys: tuple[KeyRecord, ...] = ()
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)

    def without(self, key_id: str) -> KeyFile:
        """The file when that key is revoked. Raises KeyFileError for one that is not there."""
        kept = tuple(record for record in self.keys if record.id != key_id)
        if len(kept) == len(self.keys):
            raise KeyFileError(f"there is no key {key_id!r}; `octavo keys list` shows those there are")
        return replace(self, keys=kept)


def new_key() -> str:
    """A key that nobody can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def hash_key(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def record_of(key: str, tenant: str, priorities: PriorityRange, created: str = "") -> KeyRecord:
    """The record of a new key. Raises ValueError for a tenant's name that is none."""
    digest = hash_key(key)
    return KeyRecord(digest[:_ID_CHARS], digest, check_tenant(tenant), priorities, created)


def check_tenant(name: object) -> str:
    """A tenant's name. Raises ValueError."""
    if not isinstance(name, str) or _TENANT.fullmatch(name) is None:
        raise ValueError(f"tenant {name!r} must be 1 to 64 characters of A-Z a-z 0-9 . _ -")
    return name


def read_key_file(path: str | os.PathLike[str]) -> KeyFile:
    """Read it all. Raises KeyFileError for a file that is missing or whose every part is not as it must be."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise KeyFileError(f"{os.fspath(path)}: cannot be read ({error.strerror})") from None
    if len(data) > _MOST_BYTES:
        raise KeyFileError(f"{os.fspath(path)}: has more than {_MOST_BYTES} bytes, the limit")
    try:
        return _parse(data)
    except KeyFileError as error:
        raise KeyFileError(f"{os.fspath(path)}: {error}") from None


def change_key_file(path: str | os.PathLike[str], change: Callable[[KeyFile], KeyFile]) -> KeyFile:
    """Read, change and replace the file, alone among those who do; a missing one is empty. Raises KeyFileError.

    Readers see the old file or the new one, never a half. Only its owner may read it.
    """
    target = Path(path)
    with _locked(target):
        changed = change(read_key_file(target) if target.exists() else KeyFile())
        try:
            _replace(target, _format(changed))
        except OSError as error:
            raise KeyFileError(f"{target}: cannot be written ({error.strerror})") from None
    return changed


def is_private(path: str | os.PathLike[str]) -> bool:
    """Whether nobody but owner and group may write the file; True where it cannot be looked at."""
    try:
        return not Path(path).stat().st_mode & 0o002
    except OSError:
        return True


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """A lock beside the file: the file itself is replaced while the lock is held."""
    try:
        descriptor = os.open(target.with_name(target.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise KeyFileError(f"{target}: its directory cannot be written ({error.strerror})") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(target: Path, text: str) -> None:
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
    descriptor, name = tempfile.mkstemp(prefix=target.name, dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _format(file: KeyFile) -> str:
    keys = [
        {
            "id": record.id,
            "sha256": record.sha256,
            "tenant": record.tenant,
            "priority_range": str(record.priorities),
            "created": record.created,
        }
        for record in file.keys
    ]
    tenants = {
        name: {limit: value for limit, value in asdict(limits).items() if value is not None}
        for name, limits in sorted(file.tenants.items())
    }
    return json.dumps({"keys": keys, "tenants": tenants}, indent=1, ensure_ascii=False) + "\n"


def _parse(data: bytes) -> KeyFile:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        where = f" at line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise KeyFileError(f"is not JSON{where}") from None
    fields = _object("the file", body, {"keys", "tenants"})
    keys, tenants = fields.get("keys", []), fields.get("tenants", {})
    if not isinstance(keys, list) or not isinstance(tenants, dict):
        raise KeyFileError("keys must be a list and tenants an object")
    records = tuple(_record(f"keys[{index}]", entry) for index, entry in enumerate(keys))
    if any(len({getattr(record, name) for record in records}) < len(records) for name in ("sha256", "id")):
        raise KeyFileError("two keys have the same id or the same sha256; remove one")
    return KeyFile(records, {_tenant(name): _limits(f"tenants.{name}", entry) for name, entry in tenants.items()})


def _record(where: str, entry: object) -> KeyRecord:
    fields = _object(where, entry, {"id", "sha256", "tenant", "priority_range", "created"})
    digest = fields.get("sha256")
    if not isinstance(digest, str) or _SHA256.fullmatch(digest) is None:
        raise KeyFileError(f"{where}.sha256 must be 64 hexadecimal digits; make keys with `octavo keys create`")
    for name in ("id", "priority_range", "created"):
        if not isinstance(fields.get(name, ""), str):
            raise KeyFileError(f"{where}.{name} must be a string")
    try:
        priorities = PriorityRange.parse(fields.get("priority_range", "0.."))
    except ValueError as error:
        raise KeyFileError(f"{where}.priority_range: {error}") from None
    key_id = fields.get("id") or digest[:_ID_CHARS]
    return KeyRecord(key_id, digest, _tenant(fields.get("tenant")), priorities, fields.get("created", ""))


def _tenant(name: object) -> str:
    try:
        return check_tenant(name)
    except ValueError as error:
        raise KeyFileError(str(error)) from None


def _limits(where: str, entry: object) -> TenantLimits:
    names = set(TenantLimits.__dataclass_fields__)
    fields = {name: value for name, value in _object(where, entry, names).items() if value is not None}
    for name, value in fields.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise KeyFileError(f"{where}.{name} must be a whole number of at least 1, or left out for no limit")
    return TenantLimits(**fields)


def _object(where: str, value: object, known: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise KeyFileError(f"{where} must be an object")
    if unknown := sorted(value.keys() - known):
        raise KeyFileError(f"{where} has no field {unknown[0][:64]!r}; it may have {', '.join(sorted(known))}")
    return value
