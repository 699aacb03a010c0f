"""The `.metadata` of torch.distributed.checkpoint: a pickle, decoded with a list of the classes that it may name.

Promise: whatever the bytes are, decoding them calls only classes of checkpoint metadata, and the result refers to no file
outside of the checkpoint. `state_files.py` and `StatePlanner` pass it to torch, which would unpickle the file itself, and
limit objects in the state to those that torch's restricted loader accepts.
"""

from __future__ import annotations

import io
from collections.abc import Collection

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from paceline.errors import Conflict
from paceline.learner.checkpoints.listed_pickle import ListedUnpickler

METADATA = ".metadata"


def decode_metadata(data: bytes, files: Collection[str]) -> Metadata:
    """Return the decoded `.metadata` of a checkpoint with these files. Raises Conflict for anything else than metadata."""
    try:
        metadata = ListedUnpickler(io.BytesIO(data)).load()
        named = files_of(metadata)
    except Conflict:
        raise
    except Exception as error:  # decoding other bytes may raise any error
        raise Conflict(f"it cannot be decoded: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise Conflict(f"it is a {type(metadata).__name__}, not a Metadata")
    if foreign := sorted(named - set(files)):
        raise Conflict(f"it refers to {foreign[0]!r}, which is no file of this checkpoint")
    return metadata


def files_of(metadata: Metadata) -> set[str]:
    """Return the files that hold the state."""
    return {str(info.relative_path) for info in metadata.storage_data.values()}


class StatePlanner(DefaultLoadPlanner):
    """Planner that takes from a state only the objects of torch's restricted loader: numbers, texts, containers, tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
