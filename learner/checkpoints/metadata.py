"""Decodes the pickles of torch.distributed.checkpoint (`.metadata` and the ranks' plans) with a list of allowed
classes.

Promise: for any bytes, decoding calls only classes of checkpoint metadata, and the result refers to no file outside the
checkpoint. `state_files.py` passes the decoded metadata to torch, which would otherwise unpickle the file itself;
`StatePlanner` limits objects in the state to those that torch's restricted loader accepts.
"""

from __future__ import annotations

import builtins
import enum
import io
import pickle
from collections.abc import Collection
from typing import Any, ClassVar

import torch
import torch.distributed.distributed_c10d as collectives
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from paceline import errors
from paceline.errors import Conflict

METADATA_NAMES = {
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
    "torch.serialization": {"_get_layout"},
}
"""Maps a module to the names in it that `.metadata` may use. The dtypes of `torch` are allowed too."""
PLANS = {
    **METADATA_NAMES,
    "torch.distributed.checkpoint.api": {"CheckpointException"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "LoadItemType",
        "LoadPlan",
        "ReadItem",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.distributed.checkpoint.storage": {"WriteResult"},
    "traceback": {"FrameSummary", "StackSummary"},
}
"""Maps a module to the names that objects exchanged between ranks may use. Exceptions of Python and Paceline are also
allowed.
"""


class ListedUnpickler(pickle.Unpickler):
    """Unpickler that raises Conflict for a name that is not on its list."""

    allowed: ClassVar[dict[str, set[str]]] = METADATA_NAMES

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.2 pickles an enum's member this way
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in self.allowed.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise Conflict(f"the pickle names {module}.{name}, which does not belong in a checkpoint")


def _enum_member(kind: Any, name: str) -> Any:
    """Return a member of a listed enum, for pickles that name it as an attribute. Raises Conflict for anything else."""
    if isinstance(kind, enum.EnumType) and name in kind.__members__:
        return kind[name]
    raise Conflict(
        "the pickle reads an attribute that is not a member of an enum; a checkpoint's pickle reads only enum members"
    )


class _PlanUnpickler(ListedUnpickler):
    allowed = PLANS

    def find_class(self, module: str, name: str) -> Any:
        errors_module = {"builtins": builtins, "paceline.errors": errors}.get(module)
        error_type = getattr(errors_module, name, None) if errors_module is not None else None
        if isinstance(error_type, type) and issubclass(error_type, Exception):
            return error_type
        return super().find_class(module, name)


def restrict_rank_objects() -> None:
    """Make torch's collectives over Python objects decode only checkpoint plans, in this process."""
    collectives._unpickler = _PlanUnpickler


METADATA = ".metadata"


def decode_metadata(data: bytes, files: Collection[str]) -> Metadata:
    """Return the decoded `.metadata` of a checkpoint with these files. Raises Conflict for other content."""
    try:
        metadata = ListedUnpickler(io.BytesIO(data)).load()
        named = files_of(metadata)
    except Conflict:
        raise
    except Exception as error:  # decoding other bytes may raise any error
        raise Conflict(f"the pickle cannot be decoded: {type(error).__name__}: {error}") from error
    if not isinstance(metadata, Metadata):
        raise Conflict(f"the pickle has a {type(metadata).__name__}, not a Metadata")
    if foreign := sorted(named - set(files)):
        raise Conflict(f"the pickle refers to {foreign[0]!r}, which is not a file of this checkpoint")
    return metadata


def files_of(metadata: Metadata) -> set[str]:
    return {str(info.relative_path) for info in metadata.storage_data.values()}


class StatePlanner(DefaultLoadPlanner):
    """Load planner that accepts only the objects of torch's restricted loader: numbers, texts, containers, tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)
