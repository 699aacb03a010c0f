"""Pickles that torch makes, decoded with a list of the classes that they may name.

torch.distributed.checkpoint pickles twice: the file `.metadata` (metadata.py decodes it), and the plans that the
ranks exchange when they save or load. Both are decoded by a list of the classes that may be named.
"""

from __future__ import annotations

import builtins
import enum
import pickle
from typing import Any, ClassVar

import torch
import torch.distributed.distributed_c10d as collectives

from paceline import errors
from paceline.errors import Conflict

METADATA = {
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
"""Names that `.metadata` may use, by module, besides the dtypes of `torch`."""

PLANS = {
    **METADATA,
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
"""Names that objects between ranks may use, besides the exceptions of Python and of `paceline.errors`."""


class ListedUnpickler(pickle.Unpickler):
    """Unpickler that raises Conflict for a name that is not on its list."""

    allowed: ClassVar[dict[str, set[str]]] = METADATA

    def find_class(self, module: str, name: str) -> Any:
        """Return the class of that name, if it is on the list."""
        if (module, name) == ("builtins", "getattr"):  # Python 3.11.2 pickles an enum's member so
            return _enum_member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if name in self.allowed.get(module, ()) or is_dtype:
            return super().find_class(module, name)
        raise Conflict(f"it names {module}.{name}, which is no part of a checkpoint")


def _enum_member(kind: Any, name: str) -> Any:
    """Return a member of a listed enum, for pickles that name it as an attribute. Raises Conflict for anything else."""
    if isinstance(kind, enum.EnumType) and name in kind.__members__:
        return kind[name]
    raise Conflict("it reads an attribute of what is no enum, which is no part of a checkpoint")


class _PlanUnpickler(ListedUnpickler):
    allowed = PLANS

    def find_class(self, module: str, name: str) -> Any:
        errors_module = {"builtins": builtins, "paceline.errors": errors}.get(module)
        found = getattr(errors_module, name, None) if errors_module is not None else None
        if isinstance(found, type) and issubclass(found, Exception):
            return found
        return super().find_class(module, name)


def restrict_rank_objects() -> None:
    """Make torch's collectives over Python objects decode only checkpoint plans, in this process."""
    collectives._unpickler = _PlanUnpickler
