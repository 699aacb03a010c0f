"""The manifest of a checkpoint: which files it has, with their sizes and hashes, and where in the run it stands.

The promise: it exists only when everything it lists is on disk, it appears in one piece, and a file that was cut,
changed, added or removed afterwards is found before anybody opens it as a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import Conflict, NotFound

MANIFEST = "manifest.json"
HASHING_THREADS = 4
NonNegative = Annotated[int, Field(ge=0)]


class CheckpointFile(BaseModel):
    """One file, by its path inside the checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size_bytes: NonNegative
    sha256: str


class CheckpointManifest(BaseModel):
    """What `manifest.json` holds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    session: NonNegative
    step: NonNegative
    """Steps trained: the first step to train after loading."""
    chain_hash: str
    """Position in the ledger's hash chain, as the caller gave it."""
    world_size: Annotated[int, Field(ge=1)]
    num_threads: Annotated[int, Field(ge=1)]
    """Compute threads of rank 0; with another number the continuation is not bit-identical."""
    torch_version: str
    extra: dict[str, Any]
    files: tuple[CheckpointFile, ...]


def hash_files(path: Path) -> tuple[CheckpointFile, ...]:
    """Every file below `path`, ordered by path."""
    names = sorted(_names(path))
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        sums = list(pool.map(lambda name: _sha256(path / name), names))
    return tuple(
        CheckpointFile(path=name, size_bytes=(path / name).stat().st_size, sha256=digest)
        for name, digest in zip(names, sums, strict=True)
    )


def write_manifest(path: Path, manifest: CheckpointManifest) -> str:
    """Writes the manifest as one object after everything else is durable, and returns its SHA-256."""
    data = manifest.model_dump_json(indent=1).encode()
    fsync_folder(path)
    partial = path / (MANIFEST + ".partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path / MANIFEST)
    fsync_folder(path)
    fsync_folder(path.parent)
    return hashlib.sha256(data).hexdigest()


def read_manifest(path: Path) -> tuple[CheckpointManifest, str]:
    """The manifest and its SHA-256. Raises NotFound without one, Conflict when it cannot be read."""
    try:
        data = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        reason = "it has no manifest, so writing it was never finished" if path.is_dir() else "no such folder"
        raise NotFound(f"no checkpoint at {path}: {reason}") from error
    try:
        manifest = CheckpointManifest.model_validate(json.loads(data))
    except (ValueError, ValidationError) as error:
        raise Conflict(f"checkpoint {path} refused: its manifest cannot be read: {error}") from error
    return manifest, hashlib.sha256(data).hexdigest()


def check_files(
    path: Path, manifest: CheckpointManifest, *, part: int = 0, parts: int = 1, contents: bool = True
) -> None:
    """Raises Conflict unless the folder has exactly the manifest's files with its sizes and, for this part, hashes.

    Of `parts` ranks each reads every parts-th file; names and sizes are compared by all.
    """
    listed = {file.path: file for file in manifest.files}
    present = _names(path) - {MANIFEST}
    for name in sorted(listed.keys() ^ present):
        what = "is missing" if name in listed else "is not in its manifest"
        raise Conflict(f"checkpoint {path} refused: file {name!r} {what}")
    for file in manifest.files:
        size_bytes = (path / file.path).stat().st_size
        if size_bytes != file.size_bytes:
            raise Conflict(
                f"checkpoint {path} refused: file {file.path!r} has {size_bytes} bytes, not {file.size_bytes}"
            )
    if not contents:
        return
    for file in manifest.files[part::parts]:
        digest = _sha256(path / file.path)
        if digest != file.sha256:
            raise Conflict(
                f"checkpoint {path} refused: file {file.path!r} has SHA-256 {digest}, not {file.sha256}"
            )


def fsync_folder(path: Path) -> None:
    """Makes the entries of a folder durable, which writing the files alone does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(path: Path) -> set[str]:
    return {found.relative_to(path).as_posix() for found in path.rglob("*") if not found.is_dir()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
