"""Certificates made when a test runs: a CA, and what it issues, as PEM files."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import trustme

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Issued:
    """Paths of a certificate chain and its key."""

    cert: str
    key: str


class Authority:
    """A CA in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.ca = str(directory / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca)

    def issue(self, name: str, *identities: str, common_name: str | None = None) -> Issued:
        """A certificate for these DNS names and addresses. A file of that name is replaced at once."""
        made = self._ca.issue_cert(*(identities or (LOOPBACK,)), common_name=common_name)
        issued = Issued(str(self._directory / f"{name}.pem"), str(self._directory / f"{name}.key"))
        cert = b"".join(blob.bytes() for blob in made.cert_chain_pems)
        for path, data in ((issued.cert, cert), (issued.key, made.private_key_pem.bytes())):
            Path(f"{path}.new").write_bytes(data)
            os.replace(f"{path}.new", path)
        return issued
