"""The token of one coordinator's services and clients: 32 random bytes in a file of mode 0600. Only users who can read
the file may submit runs, and a run executes the submitter's code. The coordinator makes the file in its directory; all
other processes read it at the path given by `--token-file` or PACELINE_TOKEN_FILE, else at `runs/token`. Calls prove
the token (`paceline/calls/proof.py`); it travels only to a server that TLS has verified, as gRPC metadata
(`authorization: Bearer …`), and is never on a command line."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import InvalidInput
from paceline.host.process import keep_no_core
from paceline.host.regular_file import open_regular, token_files
from paceline.tls.channels import RenewedChannel, dialled, open_plain_or_tls
from paceline.tls.folder import TlsFolder, tls_folder

if TYPE_CHECKING:
    import grpc

    from paceline.calls.proof import Credential

VARIABLE = "PACELINE_TOKEN_FILE"
TOKEN_NAME = "token"
DEFAULT_PATH = Path("runs") / TOKEN_NAME
"""Default path of the token's file; a coordinator without options makes the file there."""
PORT_VARIABLE = "PACELINE_COORDINATOR_PORT"
"""Environment variable with the port on which the coordinator itself listens, for a caller behind a tunnel or a proxy
that has another port or address."""
KEY = "authorization"
MAX_FILE_BYTES = 65_536
"""Largest size of a token's file; a larger file counts as a file without a token."""
Metadata = tuple[tuple[str, str], ...]


def token_path(default: str | os.PathLike[str] = DEFAULT_PATH) -> Path:
    """Return the path of the token's file: from the environment, else `default`."""
    return Path(os.environ.get(VARIABLE) or default)


def make_token(path: Path) -> str:
    """Return the token in a file, which is made if it is missing. Raises InvalidInput for a file without a token."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
        partial.unlink(missing_ok=True)
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
        with contextlib.suppress(FileExistsError):  # another coordinator that shares the file was first
            os.link(partial, path)
        partial.unlink()
    token = read_token(path)
    if not token:
        raise InvalidInput(f"the token file {path} is empty or unreadable; delete it, and a new one is made")
    return token


def read_token(path: Path) -> str:
    """Return the token in a file; empty if the file is missing or unreadable."""
    keep_no_core()
    token_files.add(os.path.abspath(path))
    try:
        with open_regular(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        return content.decode().strip() if len(content) <= MAX_FILE_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def metadata(token: str) -> Metadata:
    """Return the metadata of a call with this token; empty without a token."""
    return ((KEY, f"Bearer {token}"),) if token else ()


def is_same(token: str, other: str) -> bool:
    """Return whether two tokens are equal, in constant time."""
    return bool(token) and hmac.compare_digest(token.encode(), other.encode())


def known_token(
    address: str, path: Path | None = None, folder: TlsFolder | None = None, token: str = ""
) -> Callable[[], Credential | Metadata]:
    """Return a function that returns the credential of the next call to the coordinator at `address`. The credential is
    for `token`, or for the token at `path`, which is read again each time. If TLS verifies the server, the function
    returns the token as metadata. Without TLS only a token can verify the server, so without both the function refuses
    the call. Raises InvalidInput for a malformed port."""
    from paceline.calls.proof import Credential

    named = os.environ.get(PORT_VARIABLE)
    port = named or address.rpartition(":")[2]
    if not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16):
        raise InvalidInput(
            f"{PORT_VARIABLE if named else 'the address'} {named or address!r} has no port from 1 to 65535, such as 7070"
        )
    host = "" if named else dialled(address).rpartition(":")[0].strip("[]")
    is_verified = (folder or tls_folder()) is not None

    def known() -> Credential | Metadata:
        found = token or read_token(path or token_path())
        if is_verified:
            return metadata(found)
        return Credential.of_token(found, int(port), host) if found else without_token(path)

    return known


def without_token(path: Path | None = None) -> Metadata:
    """Refuse a call to a server that neither TLS nor a token verifies. Raises grpc.aio.AioRpcError."""
    from paceline.calls.proof import local_error

    raise local_error(
        "UNAUTHENTICATED",
        f"this process has no token, because the file {(path or token_path()).resolve()} is missing, empty, unreadable or "
        "no regular file, so the server cannot prove itself, and nothing was sent. Give the file of the coordinator's token with --token-file or "
        f"{VARIABLE}; if no coordinator runs yet, start one with `paceline up` or `paceline serve coordinator`",
    )


def open_channel(
    address: str,
    path: Path | None = None,
    options: Any = (),
    folder: TlsFolder | None = None,
    *,
    known: Callable[[], Credential | Metadata] | None = None,
) -> grpc.Channel:
    """Return a channel to a service whose calls prove the token at `path`, or what `known` returns. The channel is
    encrypted if `folder` or the environment names certificates; then the token is sent as it is."""
    from paceline.calls.proof import ProvenChannel

    renewed = RenewedChannel(lambda: open_plain_or_tls(address, options, folder), folder)
    known = known or known_token(address, path, folder)
    return cast("grpc.Channel", ProvenChannel(cast("grpc.Channel", renewed), address, known))
