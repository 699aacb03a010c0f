"""Lists what every sandboxed program may read besides its own folder: the interpreter, system programs and libraries,
and a few devices. Nothing of the user's home, of `/etc` as a whole, of `/proc` or `/sys`."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidInput
from paceline.reward.sandbox.protocol import PYTHON

SYSTEM = ("/usr", "/bin", "/lib", "/lib64")
FILES = ("/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/dev/random", "/dev/zero")
WRITABLE = ("/dev/null",)
PYTHON_PROGRAM = os.path.realpath(sys.executable)
"""The interpreter itself, not a virtual environment's link, because a link costs each start a dozen system calls."""
TOO_WIDE = {"/", "/home", "/root", "/etc", "/proc", "/sys", "/dev", "/run", "/var", "/tmp"}


@dataclass(frozen=True)
class Readable:
    folders: tuple[str, ...]
    """Folders, with everything below them, and single files that a program may read and execute."""
    files: tuple[str, ...] = FILES
    writable: tuple[str, ...] = WRITABLE

    @classmethod
    def of_interpreter(cls, extra: Sequence[str] = ()) -> Readable:
        """Return the absolute, existing paths of this interpreter, its packages and the system, and those in `extra`.

        Raises InvalidInput for an `extra` that is relative, missing, or so wide that programs would see files of the
        host.
        """
        for path in extra:
            wide = os.path.realpath(path) in TOO_WIDE
            if not os.path.isabs(path) or not os.path.exists(path) or wide:
                raise InvalidInput(
                    f"readable path {path!r} of the sandbox {'is too wide' if wide else 'must be absolute and exist'}; "
                    "name the folder that the programs need"
                )
        own = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)]
        wanted = [*SYSTEM, *(path for path in own if os.path.realpath(path) not in TOO_WIDE), *extra]
        return cls(_outermost([path for path in wanted if os.path.exists(path)]))


def command(argv: Sequence[str]) -> list[str]:
    """Return `argv` with this interpreter in place of PYTHON.

    It finds the environment's packages by PYTHONPATH and skips the module `site`, whose `.pth` files can take longer
    than a small program. So `exit` and `quit` are not built in.
    """
    if argv[0] == PYTHON:
        return [PYTHON_PROGRAM, "-S", "-s", *argv[1:]]
    return list(argv)


@functools.cache
def launcher() -> Path:
    """Return the launcher's compiled file; if Python could not store one, the source, which each start compiles."""
    from paceline.reward.sandbox import launcher as module

    compiled = Path(importlib.util.cache_from_source(module.__file__))
    return compiled if compiled.exists() else Path(module.__file__)


@functools.cache
def environment(workspace: str) -> Mapping[str, str]:
    """Return the complete environment of a program, which has nothing of the caller's."""
    paths = sysconfig.get_paths()
    return {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": workspace,
        "TMPDIR": workspace,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONUTF8": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys([paths["purelib"], paths["platlib"]])),
        # One thread for numerical libraries, because their stacks count as address space.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
    }


def _outermost(paths: Sequence[str]) -> tuple[str, ...]:
    kept: list[str] = []
    for path in dict.fromkeys(os.path.normpath(path) for path in paths):
        if not any(path != other and Path(path).is_relative_to(other) for other in paths):
            kept.append(path)
    return tuple(kept)
