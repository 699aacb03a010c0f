"""The one place that decides where a model comes from: a local folder, a folder at an fsspec URL, or the Hugging Face hub.

Promise: `model_source` returns what transformers' `from_pretrained` takes. Files of a URL are copied into this machine's
cache, each whole or not at all, and again once they have changed at the URL. Weights stay where they are unless asked for:
the learner reads its rows of them by ranges (`learner/model/weight_files.py`).

The cache is `$XDG_CACHE_HOME/paceline/models` (default `~/.cache/paceline/models`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec import AbstractFileSystem

from paceline.errors import InvalidInput, SpecError, Unreadable
from paceline.files.storage import is_url, open_url

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
LISTING = ".listing.json"
"""File of the cache with size and tag of each copied file, as the URL had them."""


def tokenizer_source(name: str) -> str:
    """Return what `from_pretrained` takes for a tokenizer, whose folder needs no config.json. Raises as `model_source`."""
    return model_source(name, "policy.tokenizer_name (or model_name)", config=False)


def model_source(
    name: str, field: str = "policy.model_name", *, weights: bool = False, config: bool = True
) -> str:
    """Return the local folder of a model, or its name on the hub, for transformers' `from_pretrained`.

    `field` is the spec's key, for messages. The folder of a URL holds all files but weights, and with `weights` those too.
    Raises Unreadable for a folder without config.json (where `config` is true: a tokenizer needs none) or a URL that
    cannot be read now, InvalidInput for a URL whose scheme is unknown.
    """
    if is_url(name):
        return str(_copied(name, field, weights, config))
    path = Path(name).expanduser()
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if config and looks_local and not (path / "config.json").is_file():
        raise Unreadable(f"{field} {name!r}: no such folder with a config.json in it")
    return str(path) if path.is_dir() else name


def _copied(url: str, field: str, weights: bool, config: bool) -> Path:
    """Return the cache's folder of a URL, brought up to date."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "paceline" / "models"
    folder = cache / hashlib.sha256(url.encode()).hexdigest()[:24]
    try:
        store, path = open_url(url.rstrip("/"), field)
        entries: list[dict[str, Any]] = store.ls(path, detail=True)
        present = {PurePosixPath(entry["name"]).name: entry for entry in entries if entry["type"] == "file"}
        if "config.json" in present or (present and not config):
            wanted = {name: entry for name, entry in present.items() if weights or not _is_weight(name)}
            _bring_up_to_date(folder, wanted, set(present), store)
            return folder
    except SpecError as error:
        raise InvalidInput(str(error)) from error
    except FileNotFoundError:
        pass
    except Exception as error:  # the clients of object stores raise errors without a common base
        raise Unreadable(f"{field} {url!r} cannot be read: {type(error).__name__}: {error}") from error
    raise Unreadable(f"{field} {url!r}: no such folder with a config.json in it")


def _bring_up_to_date(
    folder: Path, wanted: dict[str, dict[str, Any]], present: set[str], store: AbstractFileSystem
) -> None:
    """Copy those of the `wanted` files that have changed, and remove those that are no longer `present` at the URL."""
    folder.mkdir(parents=True, exist_ok=True)
    known = _listing(folder)
    tags = {name: _tag(entry) for name, entry in wanted.items()}
    for name, tag in sorted(tags.items()):
        if known.get(name) != tag or not (folder / name).is_file():
            with _replaced(folder / name) as partial:
                store.get_file(wanted[name]["name"], str(partial))
    for name in known.keys() - present:
        (folder / name).unlink(missing_ok=True)
    listing = {name: tag for name, tag in (known | tags).items() if name in present}
    if listing != known:
        with _replaced(folder / LISTING) as partial:
            partial.write_text(json.dumps(listing))


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """Yield a path of this process alone, which becomes `path` at the end: ranks of one host copy at the same time."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _is_weight(name: str) -> bool:
    return PurePosixPath(name).suffix in WEIGHT_SUFFIXES


def _tag(entry: dict[str, Any]) -> list[Any]:
    """Return what changes when a file does: its size and whatever the store gives of tag and time."""
    marks = (entry.get(key) for key in ("ETag", "etag", "md5Hash", "LastModified", "mtime", "created"))
    return [entry["size"], next((str(mark) for mark in marks if mark is not None), "")]


def _listing(folder: Path) -> dict[str, Any]:
    try:
        listing = json.loads((folder / LISTING).read_bytes())
    except (OSError, ValueError):
        return {}
    return listing if isinstance(listing, dict) else {}
