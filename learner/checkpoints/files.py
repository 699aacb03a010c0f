"""The files of a checkpoint: each rank lists the files that it wrote, and rank 0 finds all of them in its folder.

Ranks on several hosts may each have a folder of that path. Rank 0 then sees only a part, and a manifest of that part would
call half a checkpoint complete.
"""

from __future__ import annotations

import json
import time

import torch.distributed as dist

from paceline.errors import Conflict, Unavailable
from paceline.files.storage import Folder
from paceline.learner.checkpoints.manifest import CheckpointFile, hash_files
from paceline.learner.checkpoints.metadata import METADATA, decode_metadata, files_of
from paceline.learner.collectives import gather_bytes

LATE_PAUSES_S = (0.5, 1.0, 2.0)
"""Seconds before each further check for a file of another rank: a network file system may show it late."""


def files_of_all_ranks(
    folder: Folder, rank: int, group: dist.ProcessGroup | None, *, shared: bool = True
) -> tuple[CheckpointFile, ...]:
    """Return every rank's files as that rank wrote them. A collective call, whose result and errors are for rank 0.

    Raises Unavailable when a rank could not read its files, when the metadata name others, or when rank 0 does not see all;
    where the ranks do not share `folder`, it need not see them.
    """
    listings = [json.loads(part) for part in gather_bytes(_own(folder, rank).encode(), group)]
    if rank != 0:
        return ()
    for number, part in enumerate(listings):
        if isinstance(part, str):
            raise Unavailable(f"checkpoint {folder}: rank {number} cannot read what it wrote: {part}")
    files = [CheckpointFile.model_validate(file) for part in listings for file in part]
    listed = {file.path: file.size_bytes for file in files}
    _check_metadata(folder, set(listed))
    if not shared:
        return tuple(sorted(files, key=lambda file: file.path))
    present = folder.files()
    for pause_s in LATE_PAUSES_S:
        if present == listed:
            break
        time.sleep(pause_s)
        present = folder.files()
    if missing := sorted(name for name in listed if present.get(name) != listed[name]):
        raise Unavailable(
            f"checkpoint {folder}: rank 0 does not see {missing[0]!r} as another rank wrote it; checkpoint_dir must be seen by "
            "all ranks"
        )
    if foreign := sorted(present.keys() - listed.keys()):
        raise Unavailable(f"checkpoint {folder}: {foreign[0]!r} is no rank's")
    return tuple(sorted(files, key=lambda file: file.path))


def _own(folder: Folder, rank: int) -> str:
    """Return this rank's files as JSON: a list, or a text with the reason why there is none."""
    try:
        names = [
            name
            for name in folder.files()
            if name.startswith(f"__{rank}_") or (rank == 0 and name == METADATA)
        ]
        return json.dumps([file.model_dump() for file in hash_files(folder, names)])
    except Exception as error:  # the clients of object stores raise errors without a common base
        return json.dumps(f"{type(error).__name__}: {error}")


def _check_metadata(folder: Folder, listed: set[str]) -> None:
    try:
        named = files_of(decode_metadata(folder.read(METADATA), listed))
    except (Conflict, OSError) as error:
        raise Unavailable(
            f"checkpoint {folder}: what was written does not agree with {METADATA}: {error}"
        ) from error
    if unnamed := sorted(listed - named - {METADATA}):
        raise Unavailable(f"checkpoint {folder}: {unnamed[0]!r} was written and {METADATA} does not name it")
