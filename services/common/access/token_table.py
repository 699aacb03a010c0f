"""Keeps two private files in the coordinator's directory: `tokens.json` has the named tokens, and
`revoked-certificates.json` the revoked names of client certificates. Both have mode 0600 and are replaced as a whole.
Commands edit them under a lock; the coordinator reads changes within a second.

Each has a copy beside it (`.copy`), which is written first. If a file is damaged, its copy is in effect, so that a
restart does not stop the runs of all token holders. If a file was deleted, no token of its copy is accepted, but what
the copy revokes stays revoked. So neither damage nor deletion makes a removed token valid again: commands change the
copy too, and the coordinator copies changes that were made by hand (`keep_copy`). Reading raises Conflict if a file is
damaged and has no copy, and if a copy is damaged and has no file.

A token is 32 random bytes, so nobody can guess one from its digest. The file has only digests; the token is shown once,
when it is made. A digest is the key with which callers prove a token (`paceline/calls/proof.py`), so a reader of the
file can act as its callers. A revoked name stays revoked, also for certificates that are issued to it later: the next
holder gets another name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import Conflict, InvalidInput, NotFound
from paceline.files.whole_file import sync_folder
from paceline.host.regular_file import open_regular
from paceline.services.common.access.rights import CallerRole

FILE_NAME = "tokens.json"
FORMAT = 1
BOOTSTRAP = "bootstrap"
"""Name of the token that the coordinator makes in its directory. It has every role."""
PREFIX = "plt_"
"""Prefix of a token, by which secret scanners recognise one."""
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
MAX_TOKENS = 10_000
DAY_S = 86_400.0
REVOKED_NAME = "revoked-certificates.json"
MAX_NAME = 64
"""Longest common name in X.509, in characters."""
MAX_NAMES = 10_000
MAX_FILE_BYTES = 16 << 20
RowT = TypeVar("RowT")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NamedToken:
    """A named token; times are seconds since 1970."""

    name: str
    role: str
    sha256: str
    created_s: float
    expires_s: float = 0.0
    """Expiry in seconds since 1970; 0 means never."""
    revoked_s: float = 0.0
    """Time of revocation in seconds since 1970; 0 means not revoked."""

    def refusal(self, now_s: float) -> str:
        """Return the reason why the token is not valid; empty for a valid token."""
        if self.revoked_s:
            return f"the token {self.name} was revoked; ask an operator for another token"
        if self.expires_s and now_s >= self.expires_s:
            day = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.expires_s))
            return f"the token {self.name} expired at {day}; ask an operator for another token"
        return ""


def digest_of(token: str) -> str:
    """Return the SHA-256 of a token, in hexadecimal digits."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_table(path: Path) -> Mapping[str, NamedToken]:
    """Return the tokens by their digest; none if the file is missing. Raises Conflict for a damaged file."""

    return _read(path, _tokens, "make the tokens again", lambda row: bool(row.revoked_s))


def _tokens(content: Any) -> Mapping[str, NamedToken]:
    tokens = [NamedToken(**row) for row in content["tokens"]]
    for token in tokens:
        bytes.fromhex(token.sha256)  # raises ValueError
        if token.role:
            CallerRole(token.role)
        _check(token.name, token.sha256, numbers=(token.created_s, token.expires_s, token.revoked_s))
    return {token.sha256: token for token in tokens}


def _check(*texts: Any, numbers: tuple[Any, ...]) -> None:
    """Raise ValueError or TypeError for a value of another type, and for a number that is not finite."""
    if not all(isinstance(text, str) for text in texts) or not all(map(math.isfinite, numbers)):
        raise ValueError("a field has another type")


def create(path: Path, name: str, role: CallerRole, lasts_s: float) -> str:
    """Add and return a token for `lasts_s` seconds (0: no end). Raises InvalidInput; Conflict if a valid token has the
    name."""
    if not NAME.fullmatch(name) or name == BOOTSTRAP:
        raise InvalidInput(
            f"the name {name[:80]!r} must be 1 to 64 of the characters A-Z a-z 0-9 . _ @ -, and not {BOOTSTRAP!r}"
        )
    now_s, token = time.time(), PREFIX + secrets.token_hex(32)
    with _edited(path) as table:
        if any(row.name == name and not row.refusal(now_s) for row in table.values()):
            raise Conflict(f"a valid token named {name} exists already; revoke it, or choose another name")
        if len(table) >= MAX_TOKENS:
            raise Conflict(f"{path} has {MAX_TOKENS} tokens, the maximum; remove revoked tokens")
        row = NamedToken(name, role.value, digest_of(token), now_s, now_s + lasts_s if lasts_s else 0.0)
        table[row.sha256] = row
    return token


def revoke(path: Path, name: str, bootstrap: str = "") -> int:
    """Revoke the tokens of a name; return their number. `bootstrap` is the token of the name BOOTSTRAP. Raises
    NotFound."""
    now_s, number = time.time(), 0
    with _edited(path) as table:
        if name == BOOTSTRAP and bootstrap:
            sha256 = digest_of(bootstrap)
            table.setdefault(sha256, NamedToken(BOOTSTRAP, "", sha256, now_s))
        for sha256, row in list(table.items()):
            if row.name == name and not row.revoked_s:
                table[sha256], number = replace(row, revoked_s=now_s), number + 1
    if not number:
        raise NotFound(f"no valid token {name[:80]!r} in {path}; `paceline token list` shows the names")
    return number


@contextlib.contextmanager
def _edited(path: Path) -> Iterator[dict[str, NamedToken]]:
    """Yield the table to change; it is written if the block ends without an error. One process edits at a time."""
    with locked(path):
        table = dict(read_table(path))
        yield table
        replace_whole(path, {"format": FORMAT, "tokens": [asdict(row) for row in table.values()]})


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file beside `path` during the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path.with_name(f"{path.name}.lock"), os.O_WRONLY | os.O_CREAT, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def replace_whole(path: Path, content: Any) -> None:
    """Replace the copy and then the file. Both are synced to disk when this function returns. The caller must hold the
    file's lock."""
    for each in (_copy_of(path), path):
        _replace(each, content)


def keep_copy(path: Path) -> None:
    """Make the copy of a file equal to the file, which a person may have edited or deleted. A damaged file is left as it
    is. Raises OSError."""
    parsed = _tokens if path.name == FILE_NAME else _names
    rows = "tokens" if path.name == FILE_NAME else "names"
    with locked(path):
        try:
            content = _content(path, parsed)
        except FileNotFoundError:
            with contextlib.suppress(FileNotFoundError, Conflict):
                content = _content(_copy_of(path), parsed)
                content[rows] = [row for row in content[rows] if row.get("revoked_s")]
                _replace(_copy_of(path), content)
            return
        except Conflict:
            return
        with contextlib.suppress(FileNotFoundError, Conflict):
            if _content(_copy_of(path), parsed) == content:
                return
        _replace(_copy_of(path), content)


def _copy_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.copy")


def _replace(path: Path, content: Any) -> None:
    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def read_revoked(path: Path) -> Mapping[str, float]:
    """Return the time of each revoked name in seconds since 1970; none without a file. Raises Conflict if damaged."""

    return _read(path, _names, "revoke the names again", bool)


def _names(content: Any) -> Mapping[str, float]:
    for row in content["names"]:
        _check(row["name"], numbers=(row["revoked_s"],))
    return {row["name"]: float(row["revoked_s"]) for row in content["names"]}


def revoke_certificate(path: Path, name: str) -> None:
    """Revoke a name of certificates. Raises InvalidInput; Conflict for a name that is revoked already."""
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise InvalidInput(f"the name {name[:80]!r} must be 1 to {MAX_NAME} printable characters")
    with locked(path):
        names = dict(read_revoked(path))
        if name in names:
            raise Conflict(f"the certificates of {name} are revoked already")
        if len(names) >= MAX_NAMES:
            raise Conflict(f"{path} has {MAX_NAMES} names, the maximum; make a new authority")
        names[name] = time.time()
        rows = [{"name": each, "revoked_s": revoked_s} for each, revoked_s in names.items()]
        replace_whole(path, {"format": FORMAT, "names": rows})


def _read(
    path: Path, parsed: Callable[[Any], Mapping[str, RowT]], again: str, revokes: Callable[[RowT], bool]
) -> Mapping[str, RowT]:
    """Return the rows of a file. If the file is damaged, return the rows of its copy; if the file is missing, return
    those rows of its copy that `revokes` chooses. Raises Conflict if the copy is damaged too, or if the file is damaged
    and has no copy; `again` tells the user what to do after deleting both."""
    try:
        return parsed(_content(path, parsed))
    except FileNotFoundError:
        try:
            rows = parsed(_content(_copy_of(path), parsed))
        except FileNotFoundError:
            return {}
        except Conflict as fault:
            raise Conflict(f"{fault}, and {path} is missing; restore it, or delete the copy and {again}") from None
        return {key: row for key, row in rows.items() if revokes(row)}
    except Conflict as fault:
        try:
            rows = parsed(_content(_copy_of(path), parsed))
        except (FileNotFoundError, Conflict):
            raise Conflict(f"{fault}; restore it, or delete it and its copy and {again}") from None
        log.error(
            "%s. Its copy %s is in effect; the next command that changes the file repairs it", fault, _copy_of(path)
        )
        return rows


def _content(path: Path, parsed: Callable[[Any], object]) -> dict[str, Any]:
    """Return the content of a file that `parsed` reads. Raises FileNotFoundError; Conflict for a damaged file."""
    try:
        with open_regular(path) as file:
            content: dict[str, Any] = json.loads(file.read(MAX_FILE_BYTES))
        if content["format"] != FORMAT:
            raise Conflict(
                f"{path} has format {content['format']!r}, but this version of Paceline reads {FORMAT}; update Paceline"
            )
        parsed(content)
        return content
    except FileNotFoundError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise Conflict(f"{path} is damaged ({type(error).__name__})") from None
    except OSError as error:
        raise Conflict(f"{path} cannot be read: {error.strerror or error}") from None
