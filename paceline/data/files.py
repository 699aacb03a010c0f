"""The files that a data set's name stands for: a local path, a glob, or an fsspec URL (`s3://bucket/*.parquet`).

Files of a store are copied to a cache on this machine, once for each version of a file, because rows are read one by one.
"""

from __future__ import annotations

import glob
import hashlib
import os
import posixpath
from pathlib import Path

from paceline.errors import SpecError, Unreadable
from paceline.files.storage import is_local, is_url, open_url
from paceline.files.whole_file import written_whole

FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
"""Suffixes of files that are read by themselves; every other name is for `datasets`."""
CACHE_VARIABLE = "PACELINE_DATA_CACHE"


def names_files(name: str) -> bool:
    """Return whether a name stands for files, and not for a folder of `datasets` or a data set on the hub."""
    return is_url(name) or glob.has_magic(name) or Path(name).suffix in FILE_KINDS


def files_of(name: str, field: str) -> list[Path]:
    """Return the local files that `name`, the value of `field`, stands for; those of a glob in the order of their names.

    Raises Unreadable: there are none, the store cannot be reached; SpecError: a scheme that fsspec does not know.
    """
    if is_url(name):
        return _stored_files(name, field)
    found = sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else [name]
    paths = [path for path in map(Path, found) if path.is_file()]
    if not paths:
        what = "no file matches" if glob.has_magic(name) else "no file"
        raise Unreadable(
            f"{field}: {what} {name!r}; check the path (relative paths start at the spec's folder)"
        )
    return paths


def _stored_files(url: str, field: str) -> list[Path]:
    store, path = open_url(url, field)
    try:
        found = sorted(map(str, store.glob(path))) if glob.has_magic(path) else [path]
        files = [name for name in found if store.isfile(name)]
        if files and is_local(store):
            return [Path(name) for name in files]
        cached = [_cached(store, name) for name in files]
    except SpecError:
        raise
    except Exception as error:  # of the store's client, which has many
        raise Unreadable(
            f"{field}: {url!r} cannot be read: {type(error).__name__}: {error}; check the name, the network and the store's "
            "credentials in this process' environment"
        ) from None
    if not cached:
        raise Unreadable(f"{field}: no file at {url!r}; check bucket, folder and name")
    return cached


def _cached(store: object, path: str) -> Path:
    """Return the copy of a stored file, which is made where this version of the file has none."""
    version = hashlib.sha256(f"{store.protocol}/{path}/{store.ukey(path)}".encode()).hexdigest()  # type: ignore[attr-defined]
    copy = cache_folder() / version[:32] / posixpath.basename(path)
    if not copy.is_file():
        copy.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(copy) as partial:
            store.get_file(path, str(partial))  # type: ignore[attr-defined]
    return copy


def cache_folder() -> Path:
    """Return the folder of copies: PACELINE_DATA_CACHE, else `paceline/data` in the user's cache."""
    if given := os.environ.get(CACHE_VARIABLE):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "data"
