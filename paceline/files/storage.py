"""Folders of files on a local disk or in any object store that fsspec supports (`s3://`, `gs://`, `memory://`, …).

Promise of `Folder.write`: the file appears whole or not at all, and is durable when the call returns. Object stores
keep this promise by themselves; on a local disk, `write` needs a partial file, two fsyncs and a rename. Credentials and
endpoints come from fsspec's configuration (environment variables and files), never from a spec.

`Folder.read` returns the plaintext of a file that was encrypted with the storage key. All other methods work on the
stored bytes: sizes and digests are those of a manifest, which is compared without the key. Nothing is encrypted here;
the writer of a file decides that.

The root of a deployment's large files (`--store` of the coordinator: checkpoints, exports, stored weights) is such a
folder. An unreachable store only delays writes. A store that refuses writes is reported before a run starts.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from paceline.encryption.encrypted_file import decrypt, is_encrypted
from paceline.encryption.storage_key import storage_key
from paceline.errors import InvalidInput, SpecError, Unavailable, Unreadable
from paceline.files.whole_file import sync_folder, write_whole
from paceline.host.regular_file import check_named, open_regular, why_withheld

if TYPE_CHECKING:
    from paceline.spec import CheckpointingSection

CHUNK_BYTES = 8 << 20


def is_url(name: str) -> bool:
    """Return whether a name is an fsspec URL, not a path or a name on the hub."""
    return "://" in name


INDIRECT = frozenset({"reference", "dir", "git", "zip", "tar", "libarchive", "generic", "dask"}).union(
    {"async_wrapper", "asyncwrapper", "cached", "blockcache", "filecache", "simplecache"}
)
"""Schemes of fsspec that read other files, which the URL names or which a file lists."""


def open_url(url: str, what: str) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a URL or a local path, and the path in it. Raises SpecError, with `what` as the name,
    for a scheme that is unknown or whose package is not installed, and for a URL that leads to another URL."""
    if "::" in url or url.partition("://")[0] in INDIRECT:
        raise SpecError(f"{what} {url!r} leads to another file system; name the files themselves")
    try:
        # No cached listings, because other processes write here too.
        store, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except (ImportError, TypeError, ValueError) as error:
        raise SpecError(
            f"{what} {url!r} cannot be used: {error}; name a local folder, or install the package that fsspec needs for "
            "this scheme"
        ) from None
    return store, str(path)


def is_local(store: AbstractFileSystem) -> bool:
    """Return whether the files are on this machine, or on a file system mounted into it."""
    return isinstance(store, LocalFileSystem)


def check_readable(name: str, what: str) -> None:
    """Check a path or URL of files that somebody has named, before a library opens them. Raises Unreadable for withheld
    files of this machine (`paceline.host.regular_file`), SpecError as `open_url` does."""
    store, path = open_url(name, what) if is_url(name) else (None, str(Path(name).expanduser()))
    if store is not None and not is_local(store):
        return
    try:
        check_named(path)
    except OSError as error:
        raise Unreadable(f"{what} {name!r} cannot be read: {error.filename!r}: {error.strerror}") from None


def check_place(url: str, what: str) -> None:
    """Check a path or URL where a run writes. Raises SpecError for a place that belongs to a coordinator or holds
    secrets, and as `open_url` does."""
    store, path = open_url(url, what)
    if is_local(store) and (why := why_withheld(os.path.realpath(path))):
        raise SpecError(f"{what} {url!r} cannot be used: {why}")


class Folder:
    """One folder. It need not exist: in a store without folders it exists once it has a file."""

    def __init__(self, url: str | os.PathLike[str]):
        self.url = os.fspath(url).rstrip("/") or "/"
        self._store, self._path = open_url(self.url, "the storage")
        self.local = Path(self._path) if is_local(self._store) else None
        """Path of the folder on a local disk; None in an object store."""

    def __str__(self) -> str:
        return str(self.local) if self.local is not None else self.url

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"Folder({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Folder) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> Folder:
        return Folder(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return str(posixpath.basename(self._path))

    def exists(self, name: str = "") -> bool:
        """Return whether the folder has the file `name`; without a name, whether the folder exists."""
        return bool(self._store.exists(self._at(name)))

    def make(self) -> None:
        """Make the folder and those above it, if the file system has folders."""
        self._store.makedirs(self._path, exist_ok=True)

    def folders(self) -> list[Folder]:
        """Return the folders directly below this one, sorted by name; none if it does not exist."""
        try:
            entries = self._store.ls(self._path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = [posixpath.basename(e["name"].rstrip("/")) for e in entries if e["type"] == "directory"]
        return [self / name for name in sorted(names)]

    def files(self) -> dict[str, int]:
        """Maps the relative path of every file below this folder to the file's stored size in bytes."""
        found: dict[str, dict[str, Any]] = self._store.find(self._path, detail=True)
        return {path[len(self._path) :].lstrip("/"): int(entry["size"]) for path, entry in found.items()}

    def open(self, name: str) -> IO[bytes]:
        """Return a file opened for reading, in stored form. Raises FileNotFoundError."""
        if self.local is not None:
            return open_regular(self.local / name)
        stream: IO[bytes] = self._store.open(self._at(name), "rb")
        return stream

    def read(self, name: str) -> bytes:
        """Return a whole file, decrypted. Raises FileNotFoundError, NotADirectoryError, WrongKey."""
        with self.open(name) as file:
            data = file.read()
        return decrypt(data, storage_key(), f"{self}/{name}") if is_encrypted(data) else data

    def sha256(self, name: str) -> str:
        """Return the SHA-256 of a file's stored bytes, in hex."""
        digest = hashlib.sha256()
        with self.open(name) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
        return digest.hexdigest()

    def write(self, name: str, data: bytes) -> None:
        """Make or replace a file in one piece. On return, it and all earlier writes to this folder are durable."""
        if self.local is None:
            self._store.pipe_file(self._at(name), data)
            return
        sync_folder(self.local)
        write_whole(self.local / name, data, durable=True)
        sync_folder(self.local.parent)

    def put(self, name: str, path: Path) -> None:
        """Make or replace a file of an object store with the content of a local file. The file appears whole. Raises
        Unavailable."""
        try:
            self._store.put_file(str(path), self._at(name))
        except Exception as error:  # object stores' clients raise errors without a common base
            raise unavailable(f"{self.url}: {name} cannot be written", error) from error

    def delete(self, name: str) -> None:
        """Remove a file if it exists."""
        try:
            self._store.rm_file(self._at(name))
        except FileNotFoundError:
            return

    def remove(self) -> None:
        """Remove the folder and its content if it exists."""
        if not self.exists():
            return
        if self.local is not None:
            shutil.rmtree(self.local)
        else:
            self._store.rm(self._path, recursive=True)

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}" if name else self._path


def unavailable(what: str, error: Exception) -> Unavailable:
    """Return the error for an object store whose client raised `error`."""
    if isinstance(error, Unavailable):
        return error
    return Unavailable(f"{what}: {type(error).__name__}: {error}")


def checkpoint_folder(settings: CheckpointingSection, run_directory: str, run_id: str) -> Folder:
    """Return the folder of a run's checkpoints: one folder for each run, because names of checkpoints are unique only
    within a run."""
    elsewhere = settings.checkpoint_dir
    return Folder(f"{elsewhere.rstrip('/')}/{run_id}" if elsewhere else f"{run_directory}/checkpoints")


PROBE = ".paceline-store"
REFUSALS = (PermissionError, FileNotFoundError, NotADirectoryError)
"""Errors that a retry does not change."""
NO_CREDENTIALS = set(["NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError", "NoAuthHandlerFound"])
"""Names of the errors of stores' clients for missing credentials. Their classes may not be installed."""


def store_root(text: str, directory: Path) -> str:
    """Return the root named by `--store`, an absolute path or a URL; empty if `text` is empty or names `directory`, the
    ledger's folder. Raises InvalidInput for a scheme that is unknown or whose package is not installed."""
    if not text:
        return ""
    if is_url(text):
        try:
            open_url(text, "--store")
        except SpecError as error:
            raise InvalidInput(str(error)) from None
        return text.rstrip("/").removeprefix("file://")
    root = Path(text).expanduser().resolve()
    return "" if root == directory.resolve() else str(root)


def refusal_of_store(root: str) -> str:
    """Return a sentence that says why a store refuses writes; empty if it accepts them, or is unreachable now."""
    folder = Folder(root)
    try:
        if folder.local is not None:
            folder.make()
            is_writable = os.access(folder.local, os.W_OK | os.X_OK)
            return "" if is_writable else _sentence(root, "this process has no permission to write")
        folder.write(PROBE, b"")
    except REFUSALS as error:
        return _sentence(root, f"{type(error).__name__}: {error}")
    except Exception as error:  # object stores' clients raise errors without a common base
        if type(error).__name__ in NO_CREDENTIALS:
            return _sentence(root, f"{type(error).__name__}: {error}")
    return ""


def _sentence(root: str, reason: str) -> str:
    return (
        f"--store {root!r} of the coordinator cannot be written: {reason}; correct its name, its permissions or the "
        "credentials in the coordinator's environment"
    )
