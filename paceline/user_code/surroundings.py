"""Prepares what a process of user code gets: environment variables, a temporary folder, and a box with hidden files.

Hidden files, by `isolation()`:

OPEN      nothing
SECRETS   the token or the coordinator's directory, the certificates, the storage key's file, and the bundles of other
          runs; workers beyond loopback choose it if the kernel supports it (`paceline.services.common.user_code_options`)
REQUIRED  the files of SECRETS, and `CREDENTIALS`; a service does not start if these cannot be hidden

With SECRETS and REQUIRED, files that Python loads before the next process is in its box are read-only (`loaded_code`).

The process gets the environment variables that describe how this host works, and those that a user named; `--pass-env`
names further variables. It gets no variable that may hold a secret (a token, a key, a password, an address with a
password), and no variable that is not on this list.

The service holds a lock on the folder for temporary files and removes it after the end of the process. If the service
was killed, the lock ended with it, and `remove_left_over` of the next service on this host removes the folder.
"""

from __future__ import annotations

import contextlib
import enum
import fcntl
import os
import re
import shutil
import site
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.bundle.cache import KIND
from paceline.calls.token import token_path
from paceline.encryption.storage_key import FILE_VARIABLE, KEY_VARIABLE
from paceline.files.names import LEDGER_NAME
from paceline.host.regular_file import credentials
from paceline.tls.folder import VARIABLE as TLS_VARIABLE
from paceline.user_code.box import Box
from paceline.user_code.left_over import MARK

TEMPORARY_PREFIX = "paceline-user-code-"
MIN_AGE_S = 60.0
"""Smallest age in seconds at which a folder is removed; its service may be about to lock a younger folder."""
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class TemporaryFolder:
    """A new folder that belongs to this process until `remove`."""

    def __init__(self, parent: Path):
        """Raises OSError if the disk has no room."""
        self.path = tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=parent)
        try:
            self._lock = os.open(self.path, FOLDER_FLAGS)
        except OSError:
            os.rmdir(self.path)
            raise
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Remove the folder with its files, after the end of the process. Blocks."""
        _remove(self.path)
        os.close(self._lock)


def remove_left_over(parent: Path | None = None, min_age_s: float = MIN_AGE_S) -> int:
    """Remove the folders of dead services below `parent` (default TMPDIR); return their number. Blocks."""
    number = 0
    with contextlib.suppress(OSError), os.scandir(parent or tempfile.gettempdir()) as entries:
        for entry in entries:
            if entry.name.startswith(TEMPORARY_PREFIX):
                # Its service lives and has locked it, or the folder was removed meanwhile.
                with contextlib.suppress(OSError):
                    number += _remove_if_left(entry, min_age_s)
    return number


def _remove_if_left(entry: os.DirEntry[str], min_age_s: float) -> bool:
    state = entry.stat(follow_symlinks=False)
    if state.st_uid != os.getuid() or time.time() - state.st_ctime < min_age_s:
        return False
    folder = os.open(entry.path, FOLDER_FLAGS)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(entry.path)
    finally:
        os.close(folder)
    return True


def _remove(path: str) -> None:
    with contextlib.suppress(RecursionError):  # user code may nest folders too deeply; they stay
        shutil.rmtree(path, ignore_errors=True)


VARIABLE = "PACELINE_REQUIRE_ISOLATION"
ANSWERS_VARIABLE = "PACELINE_ANSWER_CACHE_MB"
ROOT = str(Path(__file__).resolve().parents[2])


class Isolation(enum.Enum):
    """Kinds of files that are hidden from user code, by the value of the variable PACELINE_REQUIRE_ISOLATION."""

    OPEN = "0"
    SECRETS = "secrets"
    REQUIRED = "1"


def isolation() -> Isolation:
    """Return the isolation that PACELINE_REQUIRE_ISOLATION sets; OPEN if the variable is not set."""
    match os.environ.get(VARIABLE, ""):
        case "1" | "true" | "yes":
            return Isolation.REQUIRED
        case Isolation.SECRETS.value:
            return Isolation.SECRETS
        case _:
            return Isolation.OPEN


def isolation_is_required() -> bool:
    """Return whether this process may run user code only in a box with hidden files."""
    return isolation() is Isolation.REQUIRED


@dataclass(frozen=True)
class ProcessSettings:
    environment: dict[str, str]
    box: Box
    temporary: TemporaryFolder | None = None
    """Separate folder for the process' temporary files; None if the user's folder is open to it."""

    def remove(self) -> None:
        """Remove the temporary files, after the end of the process. Blocks."""
        if self.temporary is not None:
            self.temporary.remove()


@dataclass(frozen=True)
class Surroundings:
    code: tuple[str, ...] = ()
    """Paths of the user code's files; the code may read their bundle."""
    variables: tuple[str, ...] = ()
    """Environment variables that the run's spec names."""
    may_mount: bool = False
    """True for this project's own code whose sandbox for programs may need mounts. A box with hidden files refuses
    mounts, so this code gets such a box only if isolation is required."""

    def prepare(self) -> ProcessSettings:
        """Return the settings of a new process of this code. Raises OSError if there is no room for temporary files."""
        box, variables = self.box(), self.environment()
        closed = box.closed_folders()
        if not closed:
            return ProcessSettings(variables, box)
        for folder in _caches():
            if str(folder.parent.resolve()) in closed:
                with contextlib.suppress(OSError):  # a home that is not this user's
                    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder = Path(tempfile.gettempdir()).resolve()
        if str(folder) not in closed:
            return ProcessSettings(variables, box)
        temporary = TemporaryFolder(folder)
        return ProcessSettings({**variables, "TMPDIR": temporary.path}, box, temporary)

    def environment(self) -> dict[str, str]:
        """Return the code's environment variables, without the storage key; with a key, judges store no answers."""
        variables = {**passed_variables(self.variables), MARK: "1"}
        if any(os.environ.get(name) for name in (FILE_VARIABLE, KEY_VARIABLE)):
            variables[ANSWERS_VARIABLE] = "0"
        return variables

    def box(self) -> Box:
        chosen = isolation()
        if chosen is Isolation.OPEN or (self.may_mount and chosen is Isolation.SECRETS):
            return Box()
        bundles = bundles_folder()
        inside = [Path(path).resolve() for path in self.code if path]
        bundle_names = {path.relative_to(bundles).parts[0] for path in inside if path.is_relative_to(bundles)}
        hidden = [*secret_paths(), bundles]
        if chosen is Isolation.REQUIRED:
            hidden += [path for path in credentials() if path.exists()]
        shown = [bundles / name for name in sorted(bundle_names)]
        return Box(tuple(map(str, hidden)), tuple(map(str, shown)), tuple(map(str, loaded_code(hidden))))


def secret_paths() -> Iterator[Path]:
    """Yield this project's secrets on this host: the token or coordinator's directory, certificates, storage key."""
    token = token_path().resolve()
    yield token.parent if (token.parent / LEDGER_NAME).exists() else token
    for variable in (TLS_VARIABLE, FILE_VARIABLE):
        if path := os.environ.get(variable):
            yield Path(path).resolve()


def bundles_folder() -> Path:
    return KIND.of_user("bundles").folder.resolve()


def _caches() -> Iterator[Path]:
    """Yield folders that libraries and built-in functions create at first use, which is impossible in a closed folder."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    yield Path(os.environ.get("HF_HOME") or caches / "huggingface")
    yield Path(os.environ.get("TORCH_HOME") or caches / "torch")
    yield Path(os.environ.get("PACELINE_ANSWER_CACHE") or caches / "paceline" / "answers")


def loaded_code(hidden: Iterable[Path]) -> list[Path]:
    """Return the folders from which the next process loads code before it is in its box, except those that this user
    can neither write nor replace. If user code could write there, that code would read secrets in the next process. A
    folder within a `hidden` one is always returned, so that it can be read."""
    packages = [os.path.join(ROOT, "paceline", name) for name in ("", "v1", "reward", "environment")]
    paths = sysconfig.get_paths()
    libraries = [paths[name] for name in ("stdlib", "purelib", "platlib")]
    of_user = [site.getusersitepackages()] if site.ENABLE_USER_SITE else []
    variables = ("PYTHONPATH", "LD_LIBRARY_PATH", "PATH")
    named = [path for name in variables for path in os.environ.get(name, "").split(os.pathsep)]
    folders = {Path(path).resolve() for path in (sys.prefix, *libraries, *packages, *of_user)}
    folders |= {Path(path).resolve() for path in named if os.path.isabs(path)}
    closed = set(hidden)
    return sorted(path for path in folders if closed & set(path.parents) or _may_change(path))


def _may_change(path: Path) -> bool:
    return any(os.access(folder, os.W_OK) for folder in (path, *path.parents))


PASSED_VARIABLE = "PACELINE_PASS_ENV"
"""Environment variable with the names of further variables, separated by commas; set by `--pass-env`."""
KEPT = re.compile(
    r"""
    PATH | HOME | USER | LOGNAME | SHELL | HOSTNAME | TERM | LANG | LANGUAGE | TZ | TMPDIR | TMP | TEMP
    | LD_LIBRARY_PATH | VIRTUAL_ENV | CONDA_PREFIX | TORCH_HOME | NLTK_DATA | TOKENIZERS_PARALLELISM
    | SSL_CERT_FILE | SSL_CERT_DIR | REQUESTS_CA_BUNDLE | (?i: (http|https|all|no)_proxy )
    | HF_HOME | HF_HUB_CACHE | HF_DATASETS_CACHE | HF_ENDPOINT | HF_HUB_OFFLINE | TRANSFORMERS_OFFLINE
    | PACELINE_ANSWER_CACHE | PACELINE_ANSWER_CACHE_MB
    | (LC | PYTHON | XDG | OMP | MKL | OPENBLAS | MALLOC | CUDA | NVIDIA) \w*
    """,
    re.VERBOSE,
)
HAS_USER = re.compile(r"://[^/]*@")
"""An address with a user, and perhaps a password."""


def passed_variables(named: Iterable[str] = (), environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the variables of `environment` (default: this process') that user code gets; `named` are further names.
    The storage key is never among them."""
    given = os.environ if environment is None else environment
    chosen = {*named, *filter(None, given.get(PASSED_VARIABLE, "").split(","))}
    return {
        name: value
        for name, value in given.items()
        if name not in (FILE_VARIABLE, KEY_VARIABLE)
        and (name in chosen or (KEPT.fullmatch(name) and not HAS_USER.search(value)))
    }
