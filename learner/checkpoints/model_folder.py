"""Writes a Hugging Face model folder (weights, config, generation config, tokenizer) from pieces of tensors.

Promise: `from_pretrained` on the folder gives the added tensors, tied ones tied, and the files have the names and
layouts that transformers' `save_pretrained` gives them. A file's whole header is written before its first tensor. So
only tensors whose stored layout differs from the trained one (experts) wait in memory until the rest of their layer is
there.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)
from transformers.core_model_loading import revert_weight_conversion

from paceline.data.tokens import padding_token_id
from paceline.errors import InvalidInput
from paceline.files.model_source import model_source, tokenizer_source
from paceline.learner.checkpoints.manifest import write_export_manifest
from paceline.learner.checkpoints.other_files import copy_files_of_policy
from paceline.learner.weights.stream import TensorRun, Weight
from paceline.models.export_origin import Origin
from paceline.models.pretrained import skeleton
from paceline.models.weight_files import DTYPES, INDEX, SINGLE, torch_dtype
from paceline.spec import PolicySection

MAX_FILE_BYTES = 5 << 30
NAMES = {torch_dtype(name): name for name in DTYPES}


@dataclass(frozen=True)
class TensorHeader:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Context manager that writes the weight files of a folder (one, or several with an index) from pieces in any
    order."""

    def __init__(self, folder: Path, headers: Sequence[TensorHeader], max_file_bytes: int = MAX_FILE_BYTES) -> None:
        self._folder, self._headers = folder, headers
        self._descriptors: list[int] = []
        self._at: dict[str, tuple[int, int, TensorHeader]] = {}
        self._left = {header.name: header.num_bytes for header in headers}
        parts = _parts(headers, max_file_bytes)
        self._names = {
            index: SINGLE if len(parts) == 1 else f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors"
            for index in range(len(parts))
        }
        for index, part in enumerate(parts):
            self._begin(index, part)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def write(self, name: str, first_element: int, values: Tensor) -> None:
        """Write `values` as the elements of tensor `name` from `first_element` on. Raises OSError (a full disk)."""
        descriptor, start, header = self._at[name]
        if values.dtype != header.dtype:
            raise ValueError(f"tensor {name!r} has type {header.dtype}, but the values have type {values.dtype}")
        data = memoryview(values.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        offset = start + first_element * header.dtype.itemsize
        self._left[name] -= len(data)
        while data:
            count = os.pwrite(descriptor, data, offset)
            data, offset = data[count:], offset + count

    def finish(self) -> None:
        """Write the index, if there are several files. Raises ValueError for a tensor with missing bytes."""
        for name, left in self._left.items():
            if left:
                raise ValueError(f"{left} bytes of tensor {name!r} were not written")
        if len(self._names) > 1:
            index = {
                "metadata": {"total_size": sum(header.num_bytes for header in self._headers)},
                "weight_map": dict(sorted(self._files().items())),
            }
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _files(self) -> dict[str, str]:
        numbers = {descriptor: index for index, descriptor in enumerate(self._descriptors)}
        return {name: self._names[numbers[descriptor]] for name, (descriptor, _, _) in self._at.items()}

    def _begin(self, index: int, part: Sequence[TensorHeader]) -> None:
        """Write the header of a file. Wider types come first, so that each tensor is aligned to its type."""
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offsets, end = {}, 0
        for header in sorted(part, key=lambda header: -header.dtype.itemsize):
            begin, end = end, end + header.num_bytes
            offsets[header.name] = begin
            entries[header.name] = {
                "dtype": NAMES[header.dtype],
                "shape": list(header.shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path = self._folder / self._names[index]
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._descriptors.append(descriptor)
        os.pwrite(descriptor, len(text).to_bytes(8, "little") + text, 0)
        os.ftruncate(descriptor, 8 + len(text) + end)
        for header in part:
            self._at[header.name] = descriptor, 8 + len(text) + offsets[header.name], header


def _parts(headers: Sequence[TensorHeader], max_file_bytes: int) -> list[list[TensorHeader]]:
    """Return the tensors of each file, in order; a tensor larger than `max_file_bytes` gets a separate file."""
    parts: list[list[TensorHeader]] = [[]]
    filled = 0
    for header in headers:
        if parts[-1] and filled + header.num_bytes > max_file_bytes:
            parts.append([])
            filled = 0
        parts[-1].append(header)
        filled += header.num_bytes
    return parts


LAYER = re.compile(r".*?\.layers\.\d+\.")
NAMES_SHOWN = 3
Shapes = Mapping[str, tuple[int, ...]]


class ModelFolder:
    """The unfinished folder; a context manager that closes its files."""

    def __init__(
        self,
        folder: Path,
        weights: Mapping[str, Weight],
        policy: PolicySection,
        dtype: torch.dtype | None,
        scoring: bool,
    ) -> None:
        """Begin the folder of the model that `policy` names, for `weights` in `dtype` (None: their types). Raises
        InvalidInput if their names or shapes are not that model's."""
        self._folder, self._policy = folder, policy
        self._model = empty_model(policy.model_name, scoring)
        self.names = _checked(self._model, weights, policy.model_name)
        stored = {
            name: torch.empty(tensor.tensor.shape, dtype=tensor.dtype(dtype), device="meta")
            for name, tensor in ((name, weights[name]) for name in self.names)
        }
        self._groups, self._plain = _groups(self._model, stored)
        self._waiting: dict[str, Tensor] = {}
        self._missing: dict[str, int] = {}
        self._stored = stored
        headers = [
            TensorHeader(name, tensor.dtype, tuple(tensor.shape))
            for sources in dict.fromkeys(self._groups.values())
            for name, tensor in _outputs(self._model, sources, stored).items()
        ]
        self._write_config(stored, scoring)
        self._writer = SafetensorsWriter(folder, headers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.__exit__(kind, error, trace)

    def add(self, piece: TensorRun) -> None:
        """Write a piece, or keep it until its layer can be written. Raises OSError (a full disk)."""
        sources = self._groups[piece.name]
        if piece.name in self._plain:
            self._writer.write(piece.name, piece.first_element, piece.values)
            return
        if piece.name not in self._waiting:
            self._waiting[piece.name] = torch.empty_like(self._stored[piece.name], device="cpu")
            self._missing[piece.name] = self._waiting[piece.name].numel()
        begin, end = piece.first_element, piece.first_element + piece.values.numel()
        self._waiting[piece.name].view(-1)[begin:end] = piece.values
        self._missing[piece.name] -= piece.values.numel()
        if all(self._missing.get(name) == 0 for name in sources):
            whole = {name: self._waiting.pop(name) for name in sources}
            for name, tensor in revert_weight_conversion(self._model, whole).items():
                self._writer.write(name, 0, tensor)

    def finish(self, origin: Origin | None = None) -> None:
        """Write the remaining files, once all pieces are in the folder. `origin` is the exporting run, if any."""
        self._writer.finish()
        copy_files_of_policy(self._policy.model_name, self._policy.tokenizer_name, self._folder)
        write_export_manifest(self._folder, origin)

    def _write_config(self, stored: Mapping[str, Tensor], scoring: bool) -> None:
        model: Any = self._model
        if scoring:
            name = self._policy.tokenizer_name or self._policy.model_name
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_source(name))
            # transformers scores the last token that is not padding.
            model.config.pad_token_id = padding_token_id(tokenizer)
        floating = {tensor.dtype for tensor in stored.values() if tensor.is_floating_point()}
        if len(floating) == 1:
            model.config.dtype = str(floating.pop()).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config  # the trained weights are not quantized
        model.config.save_pretrained(self._folder)
        if model.can_generate():
            model.generation_config.save_pretrained(self._folder)  # the model's own file, if any, replaces it


def empty_model(model_name: str, scoring: bool) -> PreTrainedModel:
    """Return the model's modules without memory for weights."""
    options = {"num_labels": 1} if scoring else {}
    config = AutoConfig.from_pretrained(model_source(model_name), **options)
    kind = AutoModelForSequenceClassification if scoring else AutoModelForCausalLM
    return skeleton(kind, config)  # type: ignore[no-any-return]


def own_names(model: PreTrainedModel) -> list[str]:
    """Return the names of the tensors in the order of the model. A tied tensor appears once, under its first name."""
    names: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), name)
    return list(names.values())


def stored_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of the model's files, on the meta device, with the names and layouts that the files have."""
    state = model.state_dict()
    return _outputs(model, tuple(own_names(model)), state)


def _checked(model: PreTrainedModel, weights: Mapping[str, Weight], model_name: str) -> list[str]:
    """Return `own_names`. Raises InvalidInput if `weights` are another model's."""
    names, shapes = own_names(model), _shapes(model.state_dict())
    given = _shapes({name: weight.tensor for name, weight in weights.items()})
    foreign = [name for name in weights if name not in shapes]
    if wrong := misfits(given, {name: shapes[name] for name in names}, foreign):
        raise InvalidInput(f"these weights are not of model {model_name!r}: {wrong}")
    return names


def misfits(given: Shapes, expected: Shapes, foreign: Sequence[str] = ()) -> str:
    """Return a text that lists missing and foreign names and wrong shapes; empty if all are as `expected`."""
    wrong = [f"{name} is missing" for name in expected if name not in given]
    wrong += [f"{name} is not in the model" for name in foreign]
    wrong += [
        f"{name} has shape {given[name]}, not {shape}"
        for name, shape in expected.items()
        if name in given and given[name] != shape
    ]
    more = f" and {len(wrong) - NAMES_SHOWN} more" if len(wrong) > NAMES_SHOWN else ""
    return "; ".join(wrong[:NAMES_SHOWN]) + more


def _groups(model: PreTrainedModel, stored: Mapping[str, Tensor]) -> tuple[dict[str, tuple[str, ...]], set[str]]:
    """Return a mapping from each tensor to the tensors converted with it, and the set of tensors that are stored as
    they are trained."""
    alone: dict[str, tuple[str, ...]] = {name: (name,) for name in stored}
    whole = _shapes(revert_weight_conversion(model, dict(stored)))
    if whole == _shapes(stored):
        return alone, set(stored)
    plain = {name for name in stored if _is_plain(model, name, stored)}
    layers: dict[str, list[str]] = {}
    for name in stored:
        if name not in plain:
            layer = LAYER.match(name)
            layers.setdefault(layer[0] if layer else "", []).append(name)
    groups = alone | {name: tuple(names) for names in layers.values() for name in names}
    parts: dict[str, tuple[int, ...]] = {}
    for sources in dict.fromkeys(groups.values()):
        parts |= _shapes(_outputs(model, sources, stored))
    if parts == whole:
        return groups, plain
    return dict.fromkeys(stored, tuple(stored)), set()  # the layers cannot be told apart


def _is_plain(model: PreTrainedModel, name: str, stored: Mapping[str, Tensor]) -> bool:
    return _shapes(_outputs(model, (name,), stored)) == _shapes({name: stored[name]})


def _outputs(model: PreTrainedModel, sources: tuple[str, ...], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert `sources`, and return the resulting tensors of the files, on the meta device."""
    outputs: dict[str, Tensor] = revert_weight_conversion(model, {name: stored[name] for name in sources})
    return outputs


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
