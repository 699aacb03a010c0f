"""Decides where every model comes from: a local folder, a folder at an fsspec URL, or the Hugging Face hub. Promise:
`model_source` returns the argument for transformers' `from_pretrained`. Files at a URL are copied into this
machine's cache, `PACELINE_MODEL_CACHE` (default `~/.cache/paceline/models`, limited by `PACELINE_MODEL_CACHE_MB`),
each version into a separate folder. Weights are copied only on request, because the learner reads its rows of them
by ranges (`paceline/models/weight_files.py`)."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.errors import InvalidInput, PacelineError, SpecError, Unreadable
from paceline.files.bounded_cache import CacheKind, HeldFolder, open_copies
from paceline.files.storage import check_readable, is_url, open_url

WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx"})
ADAPTER_CONFIG = "adapter_config.json"
KIND = CacheKind("model", default_mb=1 << 20, wait_s=7200.0)
HELD_FOLDERS = 16
"""A process protects this many cached folders from removal: those that it requested last."""

_held: OrderedDict[Path, HeldFolder] = OrderedDict()
_held_lock = threading.Lock()


def tokenizer_source(name: str) -> str:
    """Return `from_pretrained`'s argument for a tokenizer; config.json may be missing. Raises as `model_source`."""
    return model_source(name, "policy.tokenizer_name (or model_name)", config=False)


def model_source(name: str, field: str = "policy.model_name", *, weights: bool = False, config: bool = True) -> str:
    """Return the local folder of a model, or its name on the hub, for transformers' `from_pretrained`. `field` is the
    spec's key, for messages. The folder of a URL holds all files except weights; with `weights` it holds the weights
    too. Raises Unreadable for a folder without config.json (unless `config` is false) or a URL that cannot be read now;
    InvalidInput for a malformed config.json, an adapter's folder and a URL with an unknown scheme; Unreadable also for
    a folder with withheld files."""
    check_readable(name, field)
    if is_url(name):
        return str(_copied(name, field, weights, config))
    path = Path(name).expanduser()
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if config and (looks_local or path.is_dir()):
        _check_config(path / "config.json", f"{field} {name!r}")
    return str(path) if path.is_dir() else name


def _check_config(path: Path, what: str) -> None:
    """Raise Unreadable without config.json; InvalidInput if it is no JSON object, or if its folder has an adapter."""
    _refuse_adapter({ADAPTER_CONFIG} if path.with_name(ADAPTER_CONFIG).is_file() else (), what)
    if not path.is_file():
        raise Unreadable(f"{what}: no such folder with a config.json in it")
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise Unreadable(f"{what}: its config.json cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{what}: its config.json is not valid JSON ({error}); copy it again") from None
    if not isinstance(config, dict):
        raise InvalidInput(f"{what}: its config.json is {type(config).__name__}, not an object; copy it again")


def _refuse_adapter(names: Collection[str], what: str) -> None:
    """Raise InvalidInput if a folder with these files holds an adapter: transformers would load its base instead of the
    folder's weights, and other loaders the folder's weights without the adapter."""
    if ADAPTER_CONFIG in names:
        raise InvalidInput(
            f"{what} has an {ADAPTER_CONFIG}, so it is a LoRA adapter, not a model; merge it with `paceline convert BASE "
            f"FOLDER --adapter`, or remove the file if the weights beside it are whole"
        )


def _copied(url: str, field: str, weights: bool, config: bool) -> Path:
    """Return the cache's folder with the current files of a URL."""
    cache = KIND.of_user("models")
    try:
        store, path = open_url(url.rstrip("/"), field)
        entries: list[dict[str, Any]] = store.ls(path, detail=True)
        present = {PurePosixPath(entry["name"]).name: entry for entry in entries if entry["type"] == "file"}
        if config:
            _refuse_adapter(present, f"{field} {url!r}")
        if "config.json" in present or (present and not config):
            copied = {name: entry for name, entry in present.items() if weights or not _is_weight(name)}
            return _hold(open_copies(cache, store, url.rstrip("/"), copied))
    except SpecError as error:
        raise InvalidInput(str(error)) from error
    except FileNotFoundError:
        pass
    except PacelineError as error:
        raise type(error)(f"{field} {url!r}: {error}") from error
    except Exception as error:  # object stores' clients raise errors without a common base
        raise Unreadable(f"{field} {url!r} cannot be read: {type(error).__name__}: {error}") from error
    raise Unreadable(f"{field} {url!r}: no such folder with a config.json in it")


def _hold(folder: HeldFolder) -> Path:
    """Return the folder's path. The folder is kept until this process has requested HELD_FOLDERS other folders."""
    with _held_lock:
        if earlier := _held.pop(folder.root, None):
            earlier.close()
        _held[folder.root] = folder
        while len(_held) > HELD_FOLDERS:
            _held.popitem(last=False)[1].close()
    return folder.root


def _is_weight(name: str) -> bool:
    return PurePosixPath(name).suffix in WEIGHT_SUFFIXES
