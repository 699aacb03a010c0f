"""The files that a data set's name stands for: a local path, a glob, or an fsspec URL (`s3://bucket/*.parquet`).

Files of a store are copied to a bounded cache on this machine, once for each version of a file, because rows are read one by
one: `PACELINE_DATA_CACHE` (default `~/.cache/paceline/data`), bounded by `PACELINE_DATA_CACHE_MB`. Where this process has a storage key
the copies are encrypted.
"""

from __future__ import annotations

import glob
import posixpath
from collections.abc import Iterator
from pathlib import Path

from fsspec import AbstractFileSystem

from paceline.encryption.storage_key import storage_key
from paceline.errors import PacelineError, Unreadable
from paceline.files.bounded_cache import CacheKind, open_copies
from paceline.files.storage import is_local, is_url, open_url

FILE_KINDS = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".arrow", ".feather")
"""Suffixes of files that are read by themselves; every other name is for `datasets`."""
KIND = CacheKind("data", default_mb=1 << 18, wait_s=1800.0)


def names_files(name: str) -> bool:
    """Return whether a name stands for files, and not for a folder of `datasets` or a data set on the hub."""
    return is_url(name) or glob.has_magic(name) or Path(name).suffix in FILE_KINDS


def files_of(name: str, field: str) -> Iterator[Path]:
    """Yield the local files that `name`, the value of `field`, stands for; those of a glob in the order of their names.

    A copy of a store's file is sure to stay until the next one is asked for, and beyond that while it is open.
    Raises Unreadable: there are none, the store cannot be reached; SpecError: a scheme that fsspec does not know.
    """
    if is_url(name):
        yield from _stored_files(name, field)
        return
    found = sorted(glob.glob(name, recursive=True)) if glob.has_magic(name) else [name]
    paths = [path for path in map(Path, found) if path.is_file()]
    if not paths:
        what = "no file matches" if glob.has_magic(name) else "no file"
        raise Unreadable(
            f"{field}: {what} {name!r}; check the path (relative paths start at the spec's folder)"
        )
    yield from paths


def _stored_files(url: str, field: str) -> Iterator[Path]:
    store, files = _listed(url, field)
    if not files:
        raise Unreadable(f"{field}: no file at {url!r}; check bucket, folder and name")
    if is_local(store):
        yield from map(Path, files)
        return
    cache = KIND.of_user("data")
    for path in files:
        try:
            entry = store.info(path) | {"version": store.ukey(path)}
            held = open_copies(
                cache, store, f"{store.protocol}/{path}", {posixpath.basename(path): entry}, storage_key()
            )
        except PacelineError as error:
            raise type(error)(f"{field}: {url!r}: {error}") from None
        except Exception as error:  # of the store's client, which has many
            raise _unreadable(url, field, error) from None
        with held:
            yield held.root / posixpath.basename(path)


def _listed(url: str, field: str) -> tuple[AbstractFileSystem, list[str]]:
    """Return the store of a URL, and the paths in it of the files that there are."""
    store, path = open_url(url, field)
    try:
        found = sorted(map(str, store.glob(path))) if glob.has_magic(path) else [path]
        return store, [name for name in found if store.isfile(name)]
    except Exception as error:  # of the store's client, which has many
        raise _unreadable(url, field, error) from None


def _unreadable(url: str, field: str, error: Exception) -> Unreadable:
    return Unreadable(
        f"{field}: {url!r} cannot be read: {type(error).__name__}: {error}; check the name, the network and the store's "
        "credentials in this process' environment"
    )
