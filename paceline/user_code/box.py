"""Puts a process of user code into its box, which limits the processes that it may reach and the files that it may use.

Promises, from Linux 6.12 on (Landlock ABI 6), for the process and all that it starts, root included: it reads no
environment, memory or descriptor of a process outside, sends it no signal, and connects to none of its abstract sockets.
Root keeps the capabilities for files and users, and no other (`OF_FILES_AND_USERS`). The process can neither read nor
change the text of hidden files, and cannot change the text of kept files; `paceline.user_code.surroundings` names them.
Landlock does not protect modes, owners and times of files.

Landlock only has rules that allow, so a folder with something hidden in it is opened entry by entry. Entries made
directly in such a folder later are closed too, and an error says so (`why_refused`); secrets in separate folders avoid
that. This module imports little, because each process of user code imports it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.errors import Unavailable
from paceline.host.landlock import (
    ALL_FILE_RIGHTS,
    READ_DIR,
    READ_FILE,
    SCOPES_ABI,
    keep_capabilities,
    landlock_abi,
    restrict,
)

NAMED_FOLDERS = 3


def why_no_isolation() -> str:
    """Return why this kernel cannot keep the promise of `--require-isolation`; empty if it can."""
    abi = landlock_abi()
    if abi >= SCOPES_ABI:
        return ""
    support = f"Landlock ABI {abi}" if abi else "no Landlock"
    return f"this kernel has {support}, but ABI {SCOPES_ABI} is needed (Linux 6.12, with landlock in its list of security modules)"


@dataclass(frozen=True)
class Box:
    """Files of one process of user code, as resolved paths. Without hidden files, all files are open."""

    hidden: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    """Folders that the process may read although they are within hidden folders."""
    kept: tuple[str, ...] = ()
    """Folders that the process may read but not change; hidden files in them stay hidden. No effect without hidden
    files."""

    @classmethod
    def read(cls, text: str) -> Box:
        """Return the box that `Box.text` has written as `text`."""
        values = json.loads(text)
        return cls(tuple(values["hidden"]), tuple(values["shown"]), tuple(values["kept"]))

    def text(self) -> str:
        """Return the box as text for the process's command line."""
        return json.dumps(asdict(self))

    def close(self) -> None:
        """Put this process into the box, irrevocably. Raises Unavailable if files must be hidden but cannot be."""
        if why := why_no_isolation():
            if self.hidden:
                raise Unavailable(f"user code must be isolated, but {why}")
            return
        keep_capabilities()
        if not self.hidden:
            restrict()
            return
        readable = [*self.shown, *kept_paths(self.kept, self.hidden)]
        rules = [("/", READ_DIR), *((path, READ_FILE | READ_DIR) for path in readable)]
        opened = open_paths((*self.hidden, *self.kept))
        restrict(ALL_FILE_RIGHTS, [*rules, *((path, ALL_FILE_RIGHTS) for path in opened)])
        global _entered
        _entered = self

    def closed_folders(self) -> list[str]:
        """Return the folders that are opened entry by entry; user code can create nothing directly in such a folder."""
        if not self.hidden:
            return []
        return sorted({str(folder) for path in (*self.hidden, *self.kept) for folder in Path(path).parents})

    def sentence(self, path: str = "") -> str:
        """Return a sentence for a user whose code was refused the file `path`; empty if this box is not the reason.
        Without `path` (the file is unknown) the sentence names the folders in which this user could create files
        outside the box."""
        closed = self.closed_folders()
        if path:
            name = os.path.join(os.path.realpath(os.path.dirname(path) or "."), os.path.basename(path))
            for folders, what in (
                (self.shown, "is read-only for user code: write into TMPDIR or another folder"),
                (self.kept, "is read-only for user code, because this worker loads code from it"),
                (self.hidden, "is hidden from user code"),
            ):
                if matches := [each for each in folders if Path(name).is_relative_to(each)]:
                    return f"on this worker {matches[0]} {what} (docs/operate/security_promises.md)"
            closed = [each for each in closed if each == os.path.dirname(name)]
        else:
            writable = [each for each in closed if os.access(each, os.W_OK)]
            closed = sorted(writable, key=lambda each: -each.count("/"))[:NAMED_FOLDERS]
        if not closed:
            return ""
        return (
            f"this worker hides its secrets from user code, which therefore cannot make files directly in {', '.join(closed)}: use "
            "TMPDIR or a folder that was there when the process began, or a worker with --no-isolation (docs/operate/security_setup.md)"
        )


_entered = Box()


def why_refused(error: BaseException, box: Box | None = None) -> str:
    """Return `; ` and the sentence of `box` (None: this process's) if the box may have caused an error; else empty."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.errno in (errno.EACCES, errno.EXDEV):
            named = (cause.filename, cause.filename2)
            paths = [os.fsdecode(path) for path in named if isinstance(path, str | bytes)]
            if sentence := next(filter(None, map((box or _entered).sentence, paths)), ""):
                return f"; {sentence}"
        cause = cause.__cause__ or cause.__context__
    return ""


def open_paths(hidden: Iterable[str]) -> Iterator[str]:
    """Yield paths that cover everything but `hidden`: the entries beside each hidden path, and beside its parents."""
    return _beside({Path(path) for path in hidden})


def kept_paths(kept: Iterable[str], hidden: Iterable[str]) -> Iterator[str]:
    """Yield paths that cover everything `kept` and not `hidden`. A kept path within a hidden one is not hidden."""
    closed = {Path(path) for path in hidden}
    for folder in map(Path, kept):
        inside = {path for path in closed if path.is_relative_to(folder)}
        if inside:
            yield from _beside(inside, folder)
        else:
            yield str(folder)


def _beside(closed: set[Path], top: Path = Path("/")) -> Iterator[str]:
    parents = {parent for path in closed for parent in path.parents if parent.is_relative_to(top)}
    for folder in parents - {inner for inner in parents if closed & {inner, *inner.parents}}:
        try:
            names = os.listdir(folder)
        except OSError:
            continue  # it does not exist, or this user cannot read it anyway
        yield from (str(folder / name) for name in names if folder / name not in closed | parents)
