"""The manifests of a checkpoint (files with sizes and hashes, position in the run) and of an export.

Promise: a manifest exists only if all files that it lists are on disk, and it appears in one piece. A file that was
truncated, changed, added or removed afterwards is found before the checkpoint is opened.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import Conflict, NotFound
from paceline.files.names import CHECKPOINT_MANIFEST, EXPORT_MANIFEST
from paceline.files.storage import Folder
from paceline.models.export_origin import Origin

HASHING_THREADS = 4
NonNegative = Annotated[int, Field(ge=0)]


class CheckpointFile(BaseModel):
    """One file, named by its path inside the checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size_bytes: NonNegative
    sha256: str


class CheckpointManifest(BaseModel):
    """Content of `manifest.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    session: NonNegative
    step: NonNegative
    """Number of trained steps, which is also the first step to train after loading."""
    chain_hash: str
    """Hash in the ledger's hash chain at this step."""
    world_size: Annotated[int, Field(ge=1)]
    num_threads: Annotated[int, Field(ge=1)]
    """Compute threads of rank 0; if the number is another when training continues, the result is not bit-identical."""
    torch_version: str
    extra: dict[str, Any] = {}
    """Facts that callers add, by their names. `audit` is the newest record of the coordinator's audit log."""
    files: tuple[CheckpointFile, ...]


def hash_files(folder: Folder, names: Collection[str] | None = None) -> tuple[CheckpointFile, ...]:
    """Return the files of these names (None: all) below `folder`, ordered by path."""
    sizes = {name: size for name, size in sorted(folder.files().items()) if names is None or name in names}
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        digests = list(pool.map(folder.sha256, sizes))
    return tuple(
        CheckpointFile(path=name, size_bytes=size_bytes, sha256=digest)
        for (name, size_bytes), digest in zip(sizes.items(), digests, strict=True)
    )


def write_manifest(folder: Folder, manifest: CheckpointManifest) -> str:
    """Write the manifest as one object, after all other files are durable, and return its SHA-256."""
    data = manifest.model_dump_json(indent=1).encode()
    folder.write(CHECKPOINT_MANIFEST, data)
    return hashlib.sha256(data).hexdigest()


def read_manifest(folder: Folder) -> tuple[CheckpointManifest, str]:
    """Return the manifest and its SHA-256. Raises NotFound if there is none, Conflict if it cannot be read."""
    try:
        data = folder.read(CHECKPOINT_MANIFEST)
    except (FileNotFoundError, NotADirectoryError) as error:
        torn = "the folder has no manifest, so the checkpoint was never completely written"
        reason = torn if folder.exists() else "no such folder"
        raise NotFound(f"no checkpoint at {folder}: {reason}") from error
    try:
        manifest = CheckpointManifest.model_validate(json.loads(data))
    except (ValueError, ValidationError) as error:
        raise Conflict(f"checkpoint {folder} refused: its manifest cannot be read: {error}") from error
    return manifest, hashlib.sha256(data).hexdigest()


def check_files(folder: Folder, manifest: CheckpointManifest, *, part: int = 0, parts: int = 1) -> None:
    """Raise Conflict unless the folder has exactly the files that the manifest lists, with the listed sizes and hashes.
    Each of `parts` ranks hashes every parts-th file; all ranks compare the names and sizes of all files."""
    listed = {file.path: file for file in manifest.files}
    present = folder.files()
    for name in sorted(listed.keys() ^ (present.keys() - {CHECKPOINT_MANIFEST})):
        what = "is missing" if name in listed else "is not in its manifest"
        raise Conflict(f"checkpoint {folder} refused: file {name!r} {what}")
    for name, file in listed.items():
        if present[name] != file.size_bytes:
            raise Conflict(
                f"checkpoint {folder} refused: file {name!r} has {present[name]} bytes, not {file.size_bytes}"
            )

    for file in manifest.files[part::parts]:
        digest = folder.sha256(file.path)
        if digest != file.sha256:
            raise Conflict(f"checkpoint {folder} refused: file {file.path!r} has SHA-256 {digest}, not {file.sha256}")


def write_export_manifest(folder: Path, origin: Origin | None = None) -> None:
    """Write the manifest of the folder's files. `origin` is the run that exports them, if any."""
    run: dict[str, Any] = {} if origin is None else {"run": origin.model_dump()}
    files = [file.model_dump() for file in hash_files(Folder(folder))]
    (folder / EXPORT_MANIFEST).write_text(json.dumps(run | {"files": files}, indent=1) + "\n")
