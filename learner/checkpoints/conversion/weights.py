"""Reads the weights of a model folder in blocks of rows, converts them to a type and merges a LoRA adapter into them.

Promise: only the requested block is in memory. Without another type and an adapter, it has the same bits as the file. Axis suffixes: O outputs and I inputs of a layer, R the adapter's rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.errors import InvalidInput
from paceline.files.model_source import ADAPTER_CONFIG
from paceline.host.regular_file import read_regular
from paceline.learner.checkpoints.model_folder import TensorHeader
from paceline.learner.weights.stream import Weight
from paceline.models.pretrained import is_finite
from paceline.models.weight_files import WeightFiles, torch_dtype
from paceline.weights.format.lora_names import pairs

BLOCK_BYTES = 32 << 20
"""Largest size of a block in bytes. Only a block of a single row may be larger."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MERGED_AS: Mapping[str, Sequence[Any]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
}
"""Values of peft's settings under which the merge is W + scaling·B·A in every layer that the files name. Other
initializations (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) also change W, so A and B do not fit the base that is in the
model's folder."""
WITHOUT_EFFECT = frozenset(
    {"r", "lora_alpha", "use_rslora", "lora_dropout", "target_modules", "exclude_modules", "layers_to_transform"}
    | {"layers_pattern", "base_model_name_or_path", "revision", "task_type", "auto_mapping", "inference_mode"}
    | {"peft_version", "megatron_core", "qalora_group_size", "lorap_lr_ratio", "lorap_emb_lr"}
)
"""Settings of peft that may have any value, because they act only in training, or because scaling and file names
already contain them."""
OFF: Sequence[Any] = (None, False, "", [], {})
"""Values that switch any other setting of peft off."""


class ModelWeights:
    """The tensors of a model folder, by their names in its files."""

    def __init__(
        self,
        files: WeightFiles,
        dtype: torch.dtype | None = None,
        adapter: Path | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        """`dtype` None keeps the types of the files. Raises InvalidInput for an adapter of another model."""
        self._files, self._dtype, self._block_bytes = files.tensors, dtype, block_bytes
        self._adapter = {} if adapter is None else _read_adapter(adapter, files)

    def headers(self) -> list[TensorHeader]:
        """Return name, converted type and shape of every tensor, in the order of the files."""
        return [
            TensorHeader(name, self._converted(torch_dtype(tensor.dtype)), tensor.shape)
            for name, tensor in self._files.items()
        ]

    def blocks(self, header: TensorHeader) -> Iterator[tuple[int, int]]:
        """Yield (first row, end row) of the tensor's blocks; a tensor without axes is one row."""
        rows = header.shape[0] if header.shape else 1
        row_bytes = math.prod(header.shape[1:]) * header.dtype.itemsize
        step = max(1, self._block_bytes // max(1, row_bytes))
        for begin in range(0, max(rows, 1), step):
            yield begin, min(begin + step, rows)

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows of a tensor, merged (in float32, rounded once) and converted."""
        stored = self._files[name]
        rows = stored[(slice(begin, end),)] if stored.shape else stored[...]
        if name not in self._adapter:
            values = rows.to(self._converted(rows.dtype))
        else:
            a_RI, b_OR, scaling = self._adapter[name]
            values = Weight(rows, a_RI, b_OR[begin:end], scaling).rows(0, end - begin, a_RI, self._dtype)
        refuse_not_finite(values, name, stored.file.path)
        return values

    def _converted(self, stored: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and stored.is_floating_point else stored


def _read_adapter(folder: Path, base: WeightFiles) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return a mapping from the name of each weight that the adapter changes to (A [R, I], B [O, R], scaling)."""
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(read_regular(path))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInput(
            f"--adapter {folder}: {path} is not peft's configuration of a LoRA adapter: {error}"
        ) from error
    for name, value in config.items():
        if name not in WITHOUT_EFFECT and value not in MERGED_AS.get(name, OFF):
            raise InvalidInput(
                f"--adapter {folder}: {name} is {value!r}, which paceline does not merge; load the adapter with peft "
                "and save the result of its merge_and_unload"
            )
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    what = f"--adapter {str(folder)!r}"
    with WeightFiles({str(folder / ADAPTER_WEIGHTS): []}, what) as files:
        tensors = {name: tensor[...] for name, tensor in files.tensors.items()}
    weights = {}
    for layer, a_RI, b_OR in pairs(tensors):
        name = f"{layer}.weight"
        shape = base.tensors[name].shape if name in base.tensors else None
        if a_RI.shape[0] != rank:
            raise InvalidInput(
                f"{what} has a matrix A of shape {tuple(a_RI.shape)} for {name}, but its {ADAPTER_CONFIG} says r "
                f"{rank}, which determines the scaling; use the config of these files"
            )
        if shape != (b_OR.shape[0], a_RI.shape[1]) or a_RI.shape[0] != b_OR.shape[1]:
            where = "has no such tensor" if shape is None else f"has {name} of shape {tuple(shape)}"
            raise InvalidInput(
                f"{what} changes {name} by matrices of shapes {tuple(b_OR.shape)} and {tuple(a_RI.shape)}, but "
                f"{base.place} {where}; name the model that the adapter was trained on"
            )
        weights[name] = (a_RI, b_OR, scaling)
    if not weights:
        raise InvalidInput(f"{what} has no tensors, so the result would equal its base; copy {ADAPTER_WEIGHTS} again")
    return weights


def refuse_not_finite(tensor: Tensor, name: str, what: str) -> None:
    """Raise InvalidInput for a tensor of 16 bits or more with a NaN or an infinite element."""
    if tensor.is_floating_point() and tensor.element_size() > 1 and not is_finite(tensor):
        raise InvalidInput(
            f"{what}: tensor {name!r} has NaN or infinite elements in {tensor.dtype}; copy the files again, or convert to a "
            "type of larger range"
        )
