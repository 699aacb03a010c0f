"""Opens a file that somebody has named.

`open_regular` at once refuses every file that is not regular: opening a FIFO would wait for its writer, and a device
may never end. `open_named` is for names in a spec, a bundle or a request of somebody who may read less than this
process: it also withholds this project's secrets, and files of the kernel. Promise of `open_named`: the opened file is
judged, by its path without links, so a link that is replaced meanwhile gains nothing; links to other files may be used.
`check_named` promises less: it judges the files that are there when it is called, and a library (`datasets`,
transformers) opens them by name later. So it stops no user who can replace files of this machine in that moment.

Withheld are

- the files that a coordinator keeps beside its ledger and in the folders of runs; not exports, models and data,
- files beside a private key of TLS, and files that hold a private key, a named token or a secret's known digits,
- the files and folders that this process's environment names as tokens, keys, certificates, caches and spool, the
  usual ones in the user's cache, and `CREDENTIALS`; a cache's entry may be read while this process holds it (`shown`).

This module is not in paceline/files, because that package imports specs and encryption, which open their files with
this module.
"""

from __future__ import annotations

import contextlib
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
NAMED_TOKEN = re.compile(rb"\s*plt_[\w-]+\s*")
PRIVATE_KEY = re.compile(
    rb'(?:^(?:\xef\xbb\xbf)?[ \t]*|"private_key"\s*:\s*")-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----', re.MULTILINE
)
"""A key at the beginning of a line, or in the JSON of a service account; not in a text of a row of data."""
HEX = re.compile(rb"\s*[0-9a-fA-F]{64}\s*")
"""Form of the content of a bootstrap token, of a storage key, and of any file with a SHA-256."""
HEAD_BYTES = 64 << 10
MAX_ENTRIES = 100_000
"""Largest number of files and folders in a folder that somebody has named; the folder itself and all below it count."""
KERNEL = ("/proc", "/sys")

shown: Counter[str] = Counter()
"""Folders of caches whose files may be read now, by the number of their holders."""
token_files: set[str] = set()
"""Paths of the tokens that this process has read."""
NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EINVAL)
"""Error numbers of `open_regular` for a path that has no file; no retry changes the result."""
SKIPPED = (*NO_FILE, errno.ENXIO, errno.EACCES, errno.EPERM)  # also paths that this process cannot read as a file


class Withheld(PermissionError):
    """The error for a file that somebody has named and that no run may read."""

    def __init__(self, why: str, path: str | Path):
        super().__init__(errno.EACCES, why, str(path))


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
    Withheld."""
    file = open_regular(path)
    try:
        opened = f"/proc/self/fd/{file.fileno()}"
        real = os.readlink(opened) if os.path.islink(opened) else os.path.realpath(path)
        if why := why_withheld(real) or _why_secret(file, real):
            raise Withheld(why, path)
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
    `open_named` does, and for a folder with too many files. A path that does not exist passes, and so do pipes, sockets
    and unreadable files below a folder."""
    if not os.path.lexists(path):  # such as a name on the hub
        return
    if why := why_withheld(os.path.realpath(path)):
        raise Withheld(why, path)
    if not os.path.isdir(path):
        with contextlib.suppress(FileNotFoundError):  # a link without a target
            open_named(path).close()
        return
    walked: set[str] = set()
    found: list[str] = []
    for parent, folders, names in os.walk(path, followlinks=True):
        real = os.path.realpath(parent)
        if real in walked:  # by another link
            folders.clear()
            continue
        if any(_is_in(real, folder) for folder in KERNEL):
            raise Withheld(why_withheld(real), parent)
        walked.add(real)
        found += (os.path.join(parent, name) for name in names)
        if len(walked) + len(found) > MAX_ENTRIES:
            why = f"it has more than {MAX_ENTRIES} files and folders; name the folder of the data or the model alone"
            raise OSError(errno.E2BIG, why, str(path))
    for file in found:
        try:
            open_named(file).close()
        except OSError as error:
            if isinstance(error, Withheld) or error.errno not in SKIPPED:
                raise


def why_withheld(real: str) -> str:
    """Return why this process does not read the path `real` (without links) for others; empty if it does."""
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
    for secret, variable in _secrets().items():
        if _is_in(real, secret):
            why = "it is a token, a key, a certificate or part of a cache, which no run may name; name another file"
            return why + f", or give {variable} its own folder" * variable.endswith(("_CACHE", "_SPOOL"))
    return ""


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")


def _secrets() -> dict[str, str]:
    """Map the files and folders with secrets of this process and of its user, without links, to the variables that name
    them, if any do."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    named = {variable: value for variable, value in os.environ.items() if value and NAMED.fullmatch(variable)}
    others = (f"{cache}/paceline", os.path.abspath("runs/token"), *_credentials(), *sorted(token_files))
    return dict.fromkeys(_resolved(others), "") | dict(
        zip(_resolved(tuple(map(os.path.abspath, named.values()))), named, strict=True)
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


def _why_secret(file: BinaryIO, real: str) -> str:
    """Return why the beginning of a file shows that it is a secret; empty if it does not."""
    head = os.pread(file.fileno(), HEAD_BYTES, 0)
    is_secret = (
        NAMED_TOKEN.fullmatch(head)
        or (b" PRIVATE KEY" in head and PRIVATE_KEY.search(head))
        or (HEX.fullmatch(head) and _is_key(head, real))
    )
    return "it holds a private key or a token, which no run may name; name another file" if is_secret else ""


def _is_key(digits: bytes, real: str) -> bool:
    """Return whether a file of 64 hexadecimal digits lies beside a ledger, or has the content of a secret's file."""
    if os.path.exists(os.path.join(os.path.dirname(real), LEDGER_NAME)):
        return True
    for secret in _secrets():
        with contextlib.suppress(OSError), open_regular(secret) as file:
            if file.read(HEAD_BYTES).strip().lower() == digits.strip().lower():
                return True
    return False


QUOTED = re.compile(
    r"""(?<!\w)b?(?:'((?:[^'\\]|\\.)*)(?:'|$)|"((?:[^"\\]|\\.)*)(?:"|$))|(?<!line )(?<!row )\b\d{4,}\b"""
)
"""A quotation in a message, or a number that may be one."""


def without_quotations(text: str, is_known: Callable[[str], bool]) -> str:
    """Return a message about a named file without the quotations that may come from the file: those for which
    `is_known` is false."""

    def kept(match: re.Match[str]) -> str:
        quoted = match[1] or match[2] or match[0].strip("b'\"")
        return match[0] if quoted and is_known(quoted) else "(not shown)"

    return QUOTED.sub(kept, text)
