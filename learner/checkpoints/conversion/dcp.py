"""Checkpoints of torch.distributed.checkpoint (DCP), written and read a block at a time, in one process.

Promise: torch's own loaders read the written files, at any sharding. Reading decodes only classes of checkpoint
metadata, so files of unknown origin run no code. Writing holds one block in memory; reading holds twice the largest
chunk.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_collectively
from torch.distributed.checkpoint.state_dict_saver import save as save_collectively

from paceline.errors import Conflict, InvalidInput, Unavailable
from paceline.files.storage import Folder
from paceline.learner.checkpoints.checkpoint import as_error
from paceline.learner.checkpoints.conversion.weights import ModelWeights
from paceline.learner.checkpoints.metadata import METADATA, decode_metadata
from paceline.learner.checkpoints.model_folder import TensorHeader
from paceline.learner.checkpoints.state_files import state_reader
from paceline.learner.weights.gather import unwrapped

KEY = "model"
"""Name that trainers give to the state dict's entry with the weights."""
KEYS_SHOWN = 8
Chunk = Callable[[str, tuple[int, ...], Tensor], None]
"""Takes a tensor's name, the offset along each axis, and the values of a part."""


def write_dcp(folder: Path, weights: ModelWeights) -> None:
    """Write `{"model": {name: tensor}}` into `folder`. Raises Unavailable (a full disk)."""
    with as_error(Unavailable, f"checkpoint {folder} could not be written"):
        save_collectively(
            {},
            # No copy ahead, so that a block is written before the next one is read.
            storage_writer=FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0),
            planner=_BlockPlanner(weights),
            no_dist=True,
        )


class _BlockPlanner(DefaultSavePlanner):
    """Plans the blocks of a model. Each block is read from the model only when it is written."""

    def __init__(self, weights: ModelWeights) -> None:
        super().__init__()
        self._weights = weights
        self._written: Tensor | None = None

    def create_local_plan(self) -> SavePlan:
        items, names = [], {}
        for header in self._weights.headers():
            path = (KEY, header.name)
            names[".".join(path)] = path
            items += [self._item(header, *rows) for rows in self._weights.blocks(header)]
        self.plan = SavePlan(items, planner_data=names)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        assert write_item.tensor_data is not None
        if self._written is not None:  # torch keeps every tensor of a file until the file is closed
            self._written.untyped_storage().resize_(0)
        chunk = write_item.tensor_data.chunk
        begin, count = (chunk.offsets[0], chunk.sizes[0]) if chunk.sizes else (0, 1)
        name = write_item.index.fqn.removeprefix(f"{KEY}.")
        self._written = self._weights.read(name, begin, begin + count).clone()  # read memory cannot be resized
        return self._written

    @staticmethod
    def _item(header: TensorHeader, begin: int, end: int) -> WriteItem:
        axes = len(header.shape)
        offsets = torch.Size([begin, *[0] * (axes - 1)] if axes else [])
        sizes = torch.Size([end - begin, *header.shape[1:]] if axes else [])
        return WriteItem(
            index=MetadataIndex(f"{KEY}.{header.name}", offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
                properties=TensorProperties(dtype=header.dtype),
                size=torch.Size(header.shape),
            ),
        )


class DcpCheckpoint:
    """The weights below one key of the saved state dict. Each weight has the name that it has below this key."""

    def __init__(self, folder: Folder, key: str | None = None) -> None:
        """Read the weights under `key`; if it is None, under the entry `model`, or from the whole state dict if there
        is no such entry. Raises InvalidInput if the folder is not a checkpoint of torch.distributed.checkpoint or has
        no weights under the key, Unavailable if the folder cannot be read now."""
        self._folder = folder
        try:
            self._metadata = decode_metadata(folder.read(METADATA), folder.files())
        except Conflict as error:
            raise InvalidInput(f"{folder}: its {METADATA} is refused: {error}") from error
        except OSError as error:
            raise Unavailable(f"{folder}: {METADATA} cannot be read: {error}") from error
        entries, keys = self._metadata.state_dict_metadata, self._metadata.planner_data or {}
        self._tensors = {n: entry for n, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        paths = {stored: tuple(map(str, keys.get(stored, (stored,)))) for stored in self._tensors}
        self._names = _weights_under(key, paths, folder)

    def headers(self) -> list[TensorHeader]:
        return [
            TensorHeader(name, self._tensors[stored].properties.dtype, tuple(self._tensors[stored].size))
            for stored, name in self._names.items()
        ]

    def read(self, take: Chunk) -> None:
        """Call `take` with every stored chunk once. Raises Unavailable."""
        with as_error(Unavailable, f"checkpoint {self._folder} cannot be read"):
            load_collectively(
                {},
                storage_reader=state_reader(self._folder, self._metadata),
                planner=_ChunkPlanner(self._names, self._tensors, take),
                no_dist=True,
            )


class _ChunkPlanner(LoadPlanner):
    def __init__(self, names: Mapping[str, str], tensors: Mapping[str, TensorStorageMetadata], take: Chunk) -> None:
        self._names, self._tensors, self._take = names, tensors, take

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        pass

    def create_local_plan(self) -> LoadPlan:
        chunks = [(name, *each) for name in self._names for each in enumerate(self._tensors[name].chunks)]
        return LoadPlan([self._item(stored, index, chunk) for stored, index, chunk in chunks])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("no objects are planned")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        stored = self._tensors[read_item.storage_index.fqn]
        return torch.empty(read_item.lengths, dtype=stored.properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._take(self._names[read_item.storage_index.fqn], tuple(read_item.dest_offsets), tensor)

    @staticmethod
    def _item(stored: str, index: int, chunk: ChunkStorageMetadata) -> ReadItem:
        return ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(stored, chunk.offsets, index),
            dest_offsets=chunk.offsets,
            storage_index=MetadataIndex(stored, chunk.offsets, index),
            storage_offsets=torch.Size([0] * len(chunk.sizes)),
            lengths=chunk.sizes,
        )


def _weights_under(key: str | None, paths: Mapping[str, tuple[str, ...]], folder: Folder) -> dict[str, str]:
    """Return a mapping from weight names in the checkpoint to names in the model. `paths`: each tensor's keys."""
    entry = KEY if key is None else key
    below = {stored: path[1:] for stored, path in paths.items() if path[0] == entry and path[1:]}
    names = {stored: unwrapped(".".join(path)) for stored, path in below.items()}
    if not names and key is None:
        names = {stored: unwrapped(stored) for stored, path in paths.items() if len(path) == 1}
    if not names:
        keys = sorted({path[0] for path in paths.values()})
        raise InvalidInput(
            f"{folder} has no weights under {entry!r}; name the entry that has them with --key. The state dict has "
            f"{', '.join(keys[:KEYS_SHOWN]) or 'no tensors'}{' …' if len(keys) > KEYS_SHOWN else ''}"
        )
    return names
