"""Opens a file that somebody has named.

`open_regular` refuses every file that is not regular at once: opening a FIFO would wait for its writer, and a device may
never end. `open_named` is for names in a spec, a bundle or a request of somebody who may read less than this process:
it also withholds this project's secrets, and files of the kernel. Promise: the opened file is judged, by its path
without links, so a link that is replaced meanwhile gains nothing; links to other files may be used.

Withheld are

- the files that a coordinator keeps beside its ledger and in the folders of runs; not exports, models and data,
- files beside a private key of TLS, and files that hold a private key or a token,
- the files and folders that this process's environment names as tokens, keys, certificates, caches and spool, the
  usual ones in the user's cache, and `CREDENTIALS`; a cache's entry may be read while this process holds it (`shown`).

Not in paceline/files, because that package imports specs and encryption, which open their files with this module.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

CREDENTIALS = (
    "~/.ssh",
    "~/.aws",
    "~/.kube",
    "~/.netrc",
    "~/.config/gcloud",
    "~/.docker/config.json",
    "~/.cache/huggingface/token",
    "~/.cache/huggingface/stored_tokens",
    "/var/run/secrets",
)
"""Files of other programs with their users' credentials."""
NAMED = re.compile(r"PACELINE_(\w+_(FILE|CACHE)|TLS_DIR|SPOOL|SIGNING_KEY)")
"""Variables that name a secret's file or a folder of this project."""
LEDGER_NAME = "ledger.sqlite"
OF_COORDINATOR = re.compile(
    r"token|token\.partial.*|tokens\.json.*|revoked-certificates\.json.*|ledger\.sqlite.*|blobs|audit|logs|trackers"
    r"|webhooks|up\.lock"
)
"""Names of a coordinator's files and folders, in the folder of its ledger."""
OF_RUN = re.compile(r"(metrics|extra)\.jsonl.*|summary\.json|spec\.yaml|tensorboard|token_stats|gauges|trackers|logs")
"""Names of the coordinator's files and folders in the folder of a run, beside checkpoints and exports."""
KEYS = ("tls.key", "ca.key")
SECRET = re.compile(rb"\s*(plt_[\w-]+|[0-9a-fA-F]{64})\s*|\s*-----BEGIN [A-Z ]*PRIVATE KEY-----.*", re.DOTALL)
HEAD_BYTES = 256
CACHES = ("answers", "bundles", "data", "inductor", "models", "spool")
"""Folders in `paceline` of the user's cache."""
KERNEL = ("/proc", "/sys")

shown: Counter[str] = Counter()
"""Folders of caches whose files may be read now, by the number of their holders."""
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL)
"""Error numbers of `open_regular` for a path that has no file, which no retry changes."""


def open_regular(path: str | Path, *, follows_link: bool = True) -> BinaryIO:
    """Return the file opened for reading. Raises OSError as `open` does, and for a FIFO, a socket or a device; without
    `follows_link` also for a link."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags if follows_link else flags | os.O_NOFOLLOW)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "the path is a pipe, a socket or a device, not a file", str(path))
    return os.fdopen(descriptor, "rb")


def open_named(path: str | Path) -> BinaryIO:
    """Return the file that somebody has named, opened for reading. Raises OSError as `open_regular` does, and
    PermissionError for a withheld file."""
    file = open_regular(path)
    try:
        opened = f"/proc/self/fd/{file.fileno()}"
        real = os.readlink(opened) if os.path.islink(opened) else os.path.realpath(path)
        why = why_withheld(real) or _why_secret(file)
        if why:
            raise PermissionError(errno.EACCES, why, str(path))
    except BaseException:
        file.close()
        raise
    return file


def fd_to_append(path: Path) -> int:
    """Return a descriptor that appends to a file, which is made if it is missing. Raises OSError, also for a FIFO that
    nothing reads."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)


def read_regular(path: str | Path) -> bytes:
    """Return the whole content of the file. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def read_named(path: str | Path) -> bytes:
    """Return the whole content of the file. Raises OSError as `open_named` does."""
    with open_named(path) as file:
        return file.read()


def check_named(path: str | Path) -> None:
    """Check a file, or a folder with all files below it, before a library opens them by name. Raises OSError as
    `open_named` does; a path that does not exist passes."""
    if not os.path.lexists(path):  # such as a name on the hub
        return
    if why := why_withheld(os.path.realpath(path)):
        raise PermissionError(errno.EACCES, why, str(path))
    if os.path.isdir(path):
        for parent, folders, names in os.walk(path):
            links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
            for name in links:
                check_named(os.path.join(parent, name))
            for name in names:
                _check_file(os.path.join(parent, name))
    else:
        _check_file(path)


def _check_file(path: str | Path) -> None:
    try:
        open_named(path).close()
    except FileNotFoundError:  # a link without a target
        return


def why_withheld(real: str) -> str:
    """Return why this process reads nothing at a path without links for others; empty if it does."""
    if any(_is_in(real, folder) for folder in [*shown]):
        return ""
    if any(_is_in(real, folder) for folder in KERNEL):
        return "it belongs to the kernel; name a file of the data or the model"
    parent = os.path.dirname(real)
    if any(os.path.exists(os.path.join(parent, name)) for name in KEYS):
        return "it lies beside a private key; put the file into another folder"
    first, rest = os.path.basename(real), ""
    while True:
        if os.path.exists(os.path.join(parent, LEDGER_NAME)) and (
            OF_COORDINATOR.fullmatch(first) or OF_RUN.fullmatch(rest)
        ):
            return f"it is one of a coordinator's files in {parent}, which no run may name; name another file"
        if parent == os.path.dirname(parent):
            break
        parent, first, rest = os.path.dirname(parent), os.path.basename(parent), first
    if any(_is_in(real, secret) for secret in _secrets()):
        return "it is a token, a key, a certificate or part of a cache, which no run may name; name another file"
    return ""


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _secrets() -> tuple[str, ...]:
    """Return the files and folders with secrets of this process and of its user, without links."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    named = [value for variable, value in os.environ.items() if value and NAMED.fullmatch(variable)]
    return _resolved(
        (f"{cache}/paceline", os.path.abspath("runs/token"), *map(os.path.abspath, named), *_credentials())
    )


@functools.lru_cache(16)
def _resolved(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(os.path.realpath, names))


def credentials() -> list[Path]:
    """Return the files of other programs with this user's credentials."""
    return [Path(name) for name in _resolved(tuple(_credentials()))]


def _credentials() -> Iterator[str]:
    if home := os.environ.get("HF_HOME"):
        yield from (os.path.join(home, name) for name in ("token", "stored_tokens"))
    yield from map(os.path.expanduser, CREDENTIALS)


def _why_secret(file: BinaryIO) -> str:
    """Return why the beginning of a file shows that it is a secret; empty if it does not."""
    is_secret = SECRET.fullmatch(os.pread(file.fileno(), HEAD_BYTES, 0))
    return "it holds a private key or a token, which no run may name; name another file" if is_secret else ""


QUOTED = re.compile(
    r"""(?<!\w)b?(?:'((?:[^'\\]|\\.)*)(?:'|$)|"((?:[^"\\]|\\.)*)(?:"|$))|(?<!line )(?<!row )\b\d{4,}\b"""
)
"""A quotation in a message, or a number that may be one."""


def without_quotations(text: str, is_known: Callable[[str], bool]) -> str:
    """Return a message about a named file without the quotations that may be of the file: those not `is_known`."""

    def kept(match: re.Match[str]) -> str:
        quoted = match[1] or match[2] or ""
        return match[0] if quoted and is_known(quoted) else "(not shown)"

    return QUOTED.sub(kept, text)
