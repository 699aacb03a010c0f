"""The folder from which a process reads its certificate, key and authority, again whenever they change.

    ca.crt             certificates of the trusted authorities
    tls.crt, tls.key   the process's certificate with its chain, and the key; a person with a token has neither

cert-manager's secrets have these names. Files may be replaced at any time, one after the other: until key and
certificate match, the process keeps the files that it read before, and logs a warning. Safe to use from any thread.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from paceline.errors import InvalidInput
from paceline.files.whole_file import file_stamp
from paceline.host.regular_file import open_regular
from paceline.rate_limited_log import RateLimitedLog

VARIABLE = "PACELINE_TLS_DIR"
"""Environment variable with the folder, an alternative to `--tls-dir`; without either nothing is encrypted."""
CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
MAX_FILE_BYTES = 1 << 20
TROUBLE_LOG_S = 60.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Material:
    authority: bytes
    """PEM of the trusted authorities."""
    certificate: bytes = b""
    """PEM of the certificate with its chain; empty for a person without one."""
    key: bytes = field(default=b"", repr=False)


class TlsFolder:
    def __init__(self, path: Path):
        self.path = path
        self._lock = threading.Lock()
        self._stamp: object = None
        self._read: Material | None = None
        self._trouble = RateLimitedLog(log, TROUBLE_LOG_S)

    def read(self) -> Material:
        """Return the newest matching files of the folder. Raises InvalidInput if there were none yet."""
        with self._lock:
            stamp = tuple(file_stamp(self.path / name) for name in (AUTHORITY, CERTIFICATE, KEY))
            if self._read is None or stamp != self._stamp:
                try:
                    self._read = self._load()
                    self._stamp = stamp
                except InvalidInput as error:
                    if self._read is None:
                        raise
                    self._trouble.warning("kept", "%s; the certificates that were read earlier stay in use", error)
            return self._read

    def _load(self) -> Material:
        authority = self._content(AUTHORITY)
        if authority is None:
            raise InvalidInput(
                f"{self.path / AUTHORITY} does not exist; a folder for --tls-dir has ca.crt, and tls.crt with tls.key "
                "for a process (`paceline certs issue` makes one)"
            )
        certificate, key = self._content(CERTIFICATE), self._content(KEY)
        if (certificate is None) != (key is None):
            present, missing = (KEY, CERTIFICATE) if certificate is None else (CERTIFICATE, KEY)
            raise InvalidInput(f"{self.path} has {present} and no {missing}; put both in the folder, or neither")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cadata=authority.decode())
        except (ssl.SSLError, ValueError) as error:
            raise InvalidInput(f"{self.path / AUTHORITY} has no certificate in PEM format: {error}") from None
        if certificate is None or key is None:
            return Material(authority)
        try:
            context.load_cert_chain(self.path / CERTIFICATE, self.path / KEY, password=_refuse_password)
        except (ssl.SSLError, ValueError, OSError) as error:
            raise InvalidInput(
                f"{self.path / CERTIFICATE} and {self.path / KEY} do not match, or are not PEM files: {error}"
            ) from None
        return Material(authority, certificate, key)

    def _content(self, name: str) -> bytes | None:
        try:
            with open_regular(self.path / name) as file:
                return file.read(MAX_FILE_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InvalidInput(f"{self.path / name} cannot be read: {error.strerror}") from None


def _refuse_password() -> str:
    raise ValueError("the key is encrypted; services read keys without a password")


@cache
def _folder(path: str) -> TlsFolder:
    return TlsFolder(Path(path))


def tls_folder(path: str | os.PathLike[str] | None = None) -> TlsFolder | None:
    """Return the TLS folder at `path`, or that of PACELINE_TLS_DIR; None if neither names a folder; then nothing is
    encrypted."""
    named = os.fspath(path) if path is not None else os.environ.get(VARIABLE, "")
    return _folder(named) if named else None


class ResetSafeSocket(ssl.SSLSocket):
    """Socket class for an SSLContext. Closes itself if the peer resets the connection, which `wrap_socket` does not."""

    def __del__(self) -> None:
        self.close()
