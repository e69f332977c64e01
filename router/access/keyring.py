"""The API keys that this router takes, and whom each stands for. Reads the key file again when it changes.

Knows keys; knows no protocol, and logs no key and no hash.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from octavo.files import Stamp, stamp_of
from octavo.process import StartError
from router.access.key_file import (
    ANY_PRIORITY,
    KeyFile,
    KeyFileError,
    KeyRecord,
    PriorityRange,
    TenantLimits,
    hash_key,
    is_private,
    read_key_file,
)

_LOG = logging.getLogger(__name__)

MAX_KEY_CHARS = 1024


@dataclass(frozen=True)
class Caller:
    """Whom a request is for. Without keys everybody is the one tenant, whose name is empty."""

    tenant: str = ""
    priorities: PriorityRange = ANY_PRIORITY
    key_id: str = ""


ANYBODY = Caller()


class Keyring:
    """The single key of `--api-key`, the keys of a file, both, or none. With none, no key is asked for."""

    def __init__(self, api_key: str | None = None, key_file: str | None = None) -> None:
        """Read the file. Raises StartError where it cannot be used: there is no older set to go on with."""
        self._path = key_file
        self._single = None if api_key is None else KeyRecord("api-key", hash_key(api_key))
        # Hashes are looked up blinded by a secret of this start, so that the time of a look-up says nothing about them.
        self._blind = secrets.token_bytes(32)
        self._records: Mapping[bytes, KeyRecord] = {}
        self._tenants: Mapping[str, TenantLimits] = {}
        self._stamp: Stamp | None = None
        file = KeyFile()
        if key_file is not None:
            self._stamp = stamp_of(key_file)
            try:
                file = read_key_file(key_file)
            except KeyFileError as error:
                raise StartError(f"--key-file {error}") from None
            if not is_private(key_file):
                _LOG.warning("--key-file %s can be written by everybody on this machine; chmod o-w it", key_file)
        self._take(file)

    @property
    def asks_for_keys(self) -> bool:
        """Whether a request needs a key; also true of a file that holds none, and then nobody gets in."""
        return self._single is not None or self._path is not None

    @property
    def num_keys(self) -> int:
        return len(self._records)

    def find(self, key: str) -> Caller | None:
        """Whom the key stands for; None for one that is not known."""
        if len(key) > MAX_KEY_CHARS:
            return None
        digest = hash_key(key)
        record = self._records.get(self._blinded(digest))
        if record is None or not hmac.compare_digest(record.sha256, digest):
            return None
        return Caller(record.tenant, record.priorities, record.id)

    def limits_of(self, tenant: str) -> TenantLimits:
        """What the file says of a tenant."""
        return self._tenants.get(tenant, TenantLimits())

    def refresh(self) -> bool:
        """Take the file if it has changed, keep the keys there were if it is bad; whether anything was taken."""
        if self._path is None:
            return False
        stamp = stamp_of(self._path)
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        try:
            file = read_key_file(self._path)
        except KeyFileError as error:
            _LOG.warning("the changed key file is not taken, the old keys stay: %s", error)
            return False
        self._take(file)
        _LOG.info("key file read again: %d keys", self.num_keys)
        return True

    def _take(self, file: KeyFile) -> None:
        records = file.keys if self._single is None else (*file.keys, self._single)
        self._records = {self._blinded(record.sha256): record for record in records}
        self._tenants = file.tenants

    def _blinded(self, digest: str) -> bytes:
        return hmac.digest(self._blind, digest.encode("ascii"), "sha256")
