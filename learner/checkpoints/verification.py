"""Compares a checkpoint with the expected hash of its manifest before anything in it is decoded."""

from __future__ import annotations

import hashlib
import io
import os
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata

from paceline.encryption.encrypted_file import WrongKey, plaintext
from paceline.errors import Conflict, NotFound, PacelineError, Unavailable
from paceline.files.storage import Folder
from paceline.learner.checkpoints.manifest import CheckpointManifest, check_files, read_manifest
from paceline.learner.checkpoints.metadata import METADATA, decode_metadata
from paceline.learner.collectives import max_over_ranks

FINDINGS: tuple[tuple[type[PacelineError], str], ...] = (
    (Unavailable, "checkpoint {} cannot be read: another rank cannot read it"),
    (NotFound, "no checkpoint at {}: another rank does not find it"),
    (Conflict, "checkpoint {} refused: another rank found it damaged"),
    (WrongKey, "checkpoint {} cannot be decrypted: another rank has another storage key"),
)
"""Errors that a rank can find, the gravest last, each with the message that the other ranks then raise."""
Location = str | os.PathLike[str]
"""A local path or an fsspec URL."""


class Verified(NamedTuple):
    """A checkpoint whose files are those in the expected manifest."""

    folder: Folder
    manifest: CheckpointManifest
    metadata: Metadata


def verify(
    path: Location, expected_sha256: str, rank: int = 0, ranks: int = 1, device: torch.device | None = None
) -> Verified:
    """Compare the checkpoint with the expected hash of its manifest, reading every byte once over all ranks. Raises
    NotFound, Conflict, Unavailable or WrongKey: every rank raises the gravest error that any rank has found."""
    result: Verified | PacelineError
    try:
        result = _verify_part(Folder(path), expected_sha256, rank, ranks)
    except (NotFound, Conflict, WrongKey) as error:
        result = error
    except Exception as error:  # the clients of object stores raise errors without a common base
        result = Unavailable(f"checkpoint {path} cannot be read: {type(error).__name__}: {error}")
        result.__cause__ = error
    problem: PacelineError | None = result if isinstance(result, PacelineError) else None
    problem = _gravest_of_ranks(problem, path, device) if ranks > 1 else problem
    if problem is not None:
        raise problem
    assert isinstance(result, Verified)
    return result


def _verify_part(folder: Folder, expected_sha256: str, rank: int, ranks: int) -> Verified:
    manifest, manifest_sha256 = read_manifest(folder)
    if manifest_sha256 != expected_sha256:
        raise Conflict(
            f"checkpoint {folder} refused: its manifest has SHA-256 {manifest_sha256}, "
            f"not the expected {expected_sha256}"
        )
    check_files(folder, manifest, part=rank, parts=ranks)
    with folder.open(METADATA) as file:  # on every rank, so that each decodes the bytes that it has checked
        stored = file.read()
    listed = {file.path: file.sha256 for file in manifest.files}
    if hashlib.sha256(stored).hexdigest() != listed.get(METADATA):
        raise Conflict(f"checkpoint {folder} refused: file {METADATA!r} does not match the manifest")
    with plaintext(io.BytesIO(stored), f"{folder}/{METADATA}") as file:
        data = file.read()
    try:
        return Verified(folder, manifest, decode_metadata(data, listed))
    except Conflict as error:
        raise Conflict(f"checkpoint {folder} refused: file {METADATA!r}: {error}") from error


def _gravest_of_ranks(
    finding: PacelineError | None, path: Location, device: torch.device | None
) -> PacelineError | None:
    """Return the gravest error that any rank has found; None if no rank has found one."""
    kinds = [kind for kind, _ in FINDINGS]
    index = -1 if finding is None else kinds.index(type(finding))
    gravest = int(max_over_ranks(torch.tensor([index], dtype=torch.int32, device=device)).item())
    if gravest == index:
        return finding
    kind, text = FINDINGS[gravest]
    return kind(text.format(path))
