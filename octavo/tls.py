"""TLS of gRPC and HTTPS: PEM files are read, proved to belong together, and read again when they change.

Knows files, gRPC's credentials and Python's ssl; knows no process and no option but the names that messages give.
Private keys are in no message.
"""

from __future__ import annotations

import logging
import ssl
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from octavo.files import Stamp, stamp_of
from octavo.process import StartError

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TlsFiles:
    """Paths of PEM files: a certificate chain and its key, and the CA whose certificates peers must show.

    Without `ca` a server asks for no certificate, and a client trusts the system's CAs. `prefix` is how the options
    that named the files begin, such as `--tls`.
    """

    cert: str | None
    key: str | None
    ca: str | None
    prefix: str = "--tls"
    ca_flag: str = "--tls-client-ca"

    @property
    def paths(self) -> tuple[str, ...]:
        return tuple(path for path in (self.cert, self.key, self.ca) if path is not None)


@dataclass(frozen=True)
class TlsMaterial:
    """What the files held. `repr` shows none of it."""

    cert_pem: bytes | None
    key_pem: bytes | None
    ca_pem: bytes | None

    def __repr__(self) -> str:
        return "TlsMaterial(...)"


def read_material(files: TlsFiles) -> TlsMaterial:
    """Read the files and prove that they belong together. Raises StartError naming the option and the file."""
    cert_pem = _read(f"{files.prefix}-cert", files.cert)
    key_pem = _read(f"{files.prefix}-key", files.key)
    ca_pem = _read(files.ca_flag, files.ca)
    if files.cert is not None and files.key is not None:
        _load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
    if files.ca is not None:
        _load_ca(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), files)
    return TlsMaterial(cert_pem, key_pem, ca_pem)


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """For a gRPC client: trusts `ca` (the system's CAs without one), and shows `cert` where it is given."""
    material = read_material(files)
    return grpc.ssl_channel_credentials(material.ca_pem, material.key_pem, material.cert_pem)


def internal_channel_credentials(cert: str | None, key: str | None, ca: str | None) -> grpc.ChannelCredentials | None:
    """What a process shows the scheduler, from its `--internal-tls-*` options; None for a plain channel."""
    return None if cert is None else channel_credentials(internal_files(cert, key, ca))


def internal_files(cert: str | None, key: str | None, ca: str | None) -> TlsFiles:
    """The files of `--internal-tls-*`."""
    return TlsFiles(cert, key, ca, prefix="--internal-tls", ca_flag="--internal-tls-ca")


class ServerTls:
    """A server's side, for gRPC and HTTPS at once. `refresh` takes files that have changed; new connections see them.

    HTTPS takes a new certificate, and trusts a new CA beside the old one until the process starts anew; gRPC takes
    both at once.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Read everything. Raises StartError."""
        if files.cert is None or files.key is None:
            raise ValueError("a server needs a certificate and its key")
        self._files = files
        self._stamps = self._stamp()
        self._material = read_material(files)
        self.ssl_context = self._make_context()
        self._fetched: TlsMaterial = self._material

    @property
    def asks_for_certificates(self) -> bool:
        """Whether clients must show a certificate."""
        return self._files.ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """For a gRPC server's secure port."""
        # The stubs do not know that a fetcher may return None, for no change.
        fetch = typing.cast("Callable[[], grpc.ServerCertificateConfiguration]", self._changed)
        return grpc.dynamic_ssl_server_credentials(self._configuration(), fetch, self.asks_for_certificates)

    def refresh(self) -> bool:
        """Take the files if they have changed, keep what there was if they are bad; whether anything was taken."""
        stamps = self._stamp()
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        try:
            material = read_material(self._files)
            _load_chain(self.ssl_context, self._files)
            if self._files.ca is not None:
                _load_ca(self.ssl_context, self._files)
        except StartError as error:
            _LOG.warning("changed TLS files are not taken, the old ones stay: %s", error)
            return False
        self._material = material
        _LOG.info("TLS files read again")
        return True

    def _stamp(self) -> Sequence[Stamp | None]:
        return [stamp_of(path) for path in self._files.paths]

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        material = self._material
        assert material.key_pem is not None
        assert material.cert_pem is not None
        return grpc.ssl_server_certificate_configuration([(material.key_pem, material.cert_pem)], material.ca_pem)

    def _changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC at each handshake, in a thread of its own."""
        if self._fetched is self._material:
            return None
        self._fetched = self._material
        return self._configuration()

    def _make_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        _load_chain(context, self._files)
        if self.asks_for_certificates:
            _load_ca(context, self._files)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def _read(flag: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise StartError(f"{flag} {path}: cannot be read ({error.strerror}); name a readable PEM file") from None


def _load_chain(context: ssl.SSLContext, files: TlsFiles) -> None:
    assert files.cert is not None
    try:
        # A password is never asked for: a process has nobody to ask.
        context.load_cert_chain(files.cert, files.key, password="")
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise StartError(
            f"{files.prefix}-cert {files.cert} and {files.prefix}-key {files.key} do not go together "
            f"({_reason(error)}); give a PEM certificate chain and its unencrypted private key"
        ) from None


def _load_ca(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        context.load_verify_locations(files.ca)
    except OSError as error:
        raise StartError(f"{files.ca_flag} {files.ca}: holds no certificates ({_reason(error)})") from None


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    return str(reason).lower().replace("_", " ")
