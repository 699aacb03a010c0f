"""The weights of a model folder as blocks of rows: converted to a type, with a LoRA adapter merged, a block at a time.

Promise: nothing but the block that is asked for is in memory, and without a type and an adapter its bits are those of the
file. Axis suffixes: O outputs and I inputs of a layer, R the adapter's rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from learner.checkpoints.safetensors_writer import TensorHeader
from learner.model.weight_files import DTYPES, WeightFiles
from learner.weights.stream import Weight
from paceline.errors import InvalidInput
from paceline.regular_file import read_regular
from paceline.weights.lora_names import pairs

BLOCK_BYTES = 32 << 20
"""Largest block, unless a single row is larger."""
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NEUTRAL: Mapping[str, Any] = {
    "peft_type": "LORA",
    "use_dora": False,
    "bias": "none",
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "fan_in_fan_out": False,
    "target_parameters": None,
    "trainable_token_indices": None,
}
"""Settings of peft under which the merge is W + scaling·B·A in every layer that the files name."""


class ModelWeights:
    """The tensors of a model folder, by their names in its files."""

    def __init__(
        self, files: WeightFiles, dtype: torch.dtype | None = None, adapter: Path | None = None
    ) -> None:
        """`dtype` None keeps the types of the files. Raises InvalidInput for an adapter that is not of this model."""
        self._files, self._dtype = files.tensors, dtype
        self._adapter = {} if adapter is None else _read_adapter(adapter, files)

    def headers(self) -> list[TensorHeader]:
        """Return name, type and shape of every tensor as it is converted, in the order of the files."""
        return [
            TensorHeader(name, self._converted(DTYPES[tensor.dtype]), tensor.shape)
            for name, tensor in self._files.items()
        ]

    def blocks(self, header: TensorHeader) -> Iterator[tuple[int, int]]:
        """Yield (first row, end row) of blocks that make up the tensor; a tensor without axes is one row."""
        rows = header.shape[0] if header.shape else 1
        row_bytes = math.prod(header.shape[1:]) * header.dtype.itemsize
        step = max(1, BLOCK_BYTES // max(1, row_bytes))
        for begin in range(0, max(rows, 1), step):
            yield begin, min(begin + step, rows)

    def read(self, name: str, begin: int, end: int) -> Tensor:
        """Return rows of a tensor, merged (in float32, rounded once) and converted."""
        stored = self._files[name]
        rows = stored[(slice(begin, end),)] if stored.shape else stored[...]
        if name not in self._adapter:
            return rows.to(self._converted(rows.dtype))
        a_RI, b_OR, scaling = self._adapter[name]
        return Weight(rows, a_RI, b_OR[begin:end], scaling).rows(0, end - begin, a_RI, self._dtype)

    def _converted(self, stored: torch.dtype) -> torch.dtype:
        return self._dtype if self._dtype is not None and stored.is_floating_point else stored


def _read_adapter(folder: Path, base: WeightFiles) -> dict[str, tuple[Tensor, Tensor, float]]:
    """Return (A [R, I], B [O, R], scaling) by the name of the weight that they change."""
    path = folder / ADAPTER_CONFIG
    try:
        config = json.loads(read_regular(path))
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidInput(
            f"--adapter {folder}: {path} is not peft's configuration of a LoRA adapter: {error}"
        ) from error
    for name, neutral in NEUTRAL.items():
        if config.get(name, neutral) not in (neutral, None, []):
            raise InvalidInput(
                f"--adapter {folder}: {name} is {config[name]!r}, which is not merged here; merge it with peft's "
                "merge_and_unload"
            )
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    what = f"--adapter {str(folder)!r}"
    with WeightFiles({str(folder / ADAPTER_WEIGHTS): []}, what) as files:
        tensors = {name: tensor[...] for name, tensor in files.tensors.items()}
    found = {}
    for layer, a_RI, b_OR in pairs(tensors):
        name = f"{layer}.weight"
        shape = base.tensors[name].shape if name in base.tensors else None
        if shape != (b_OR.shape[0], a_RI.shape[1]) or a_RI.shape[0] != b_OR.shape[1]:
            where = "has no such tensor" if shape is None else f"has {name} of shape {tuple(shape)}"
            raise InvalidInput(
                f"{what} changes {name} by B {tuple(b_OR.shape)} and A {tuple(a_RI.shape)}, and {base.place} {where}; name "
                "the model that the adapter was trained on"
            )
        found[name] = (a_RI, b_OR, scaling)
    return found
