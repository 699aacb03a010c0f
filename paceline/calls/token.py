"""The token of one coordinator's services and clients: 32 random bytes in a file of mode 0600. Only users who can read
the file may submit runs, and a run executes the submitter's code. The coordinator makes the file in its directory;
all others read it at the path given by `--token-file` or PACELINE_TOKEN_FILE, else at `runs/token`. The token
travels as gRPC metadata (`authorization: Bearer …`), never on a command line."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.errors import InvalidInput
from paceline.host.process import keep_no_core
from paceline.tls.channels import RenewedChannel, open_plain_or_tls
from paceline.tls.folder import TlsFolder

if TYPE_CHECKING:
    import grpc

VARIABLE = "PACELINE_TOKEN_FILE"
TOKEN_NAME = "token"
DEFAULT_PATH = Path("runs") / TOKEN_NAME
"""Default path of the token's file; a coordinator without options makes the file there."""
KEY = "authorization"
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
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def metadata(token: str) -> Metadata:
    """Return the metadata of a call with this token; empty without a token."""
    return ((KEY, f"Bearer {token}"),) if token else ()


def is_same(token: str, other: str) -> bool:
    """Return whether two tokens are equal, in constant time."""
    return bool(token) and hmac.compare_digest(token.encode(), other.encode())


def open_channel(
    address: str, path: Path | None = None, options: Any = (), folder: TlsFolder | None = None
) -> grpc.Channel:
    """Return a channel to a service; it adds the token at `path`, read again for each call. It is encrypted if `folder`
    or the environment names certificates."""
    renewed = RenewedChannel(lambda: open_plain_or_tls(address, options, folder), folder)
    return cast("grpc.Channel", TokenChannel(cast("grpc.Channel", renewed), path or token_path()))


class TokenChannel:
    """The part of a channel that stubs use; adds the token to every call."""

    def __init__(self, channel: grpc.Channel, path: Path):
        self._channel = channel
        self._path = path

    def __enter__(self) -> TokenChannel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    def _with_token(self, kind: str, *method: Any, **how: Any) -> Callable[..., Any]:
        call = getattr(self._channel, kind)(*method, **how)
        return lambda request, **options: call(request, metadata=metadata(read_token(self._path)), **options)

    unary_unary = partialmethod(_with_token, "unary_unary")
    unary_stream = partialmethod(_with_token, "unary_stream")
    stream_unary = partialmethod(_with_token, "stream_unary")
    stream_stream = partialmethod(_with_token, "stream_stream")
