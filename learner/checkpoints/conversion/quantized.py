"""Quantizing the linear layers of a model folder by torchao, in the form that transformers loads."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any, Literal

from paceline.errors import InvalidInput
from paceline.files.model_source import model_source
from paceline.learner.checkpoints.export_folder import written_beside
from paceline.learner.checkpoints.export_manifest import write_export_manifest
from paceline.learner.checkpoints.other_files import CONFIG, check_tokenizer, copy_other_files
from paceline.learner.checkpoints.verification import Location
from paceline.models.pretrained import check_model


def quantize_folder(source: str, destination: Location, kind: Literal["int8", "float8"]) -> None:
    """Write the model of a folder with the weights of its linear layers, but for the LM head, in eight bits.

    The weights have a scale for each output; activations keep their type. The whole model is in memory. Raises InvalidInput
    without torchao, Conflict when `destination` exists.
    """
    if importlib.util.find_spec("torchao") is None:
        raise InvalidInput("--quantize needs torchao: pip install 'paceline[quantize]'")
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = Int8WeightOnlyConfig() if kind == "int8" else Float8WeightOnlyConfig()
    auto: Any = AutoModelForCausalLM
    folder = model_source(source, "SOURCE", weights=True)
    if check_model(auto, folder, "SOURCE"):
        raise InvalidInput(f"SOURCE {source!r} is quantized already; take its 16-bit or 32-bit version")
    model = auto.from_pretrained(folder, dtype="auto", quantization_config=TorchAoConfig(config))
    with written_beside(destination) as partial:
        model.save_pretrained(partial)
        for file in partial.glob("*.safetensors"):
            # safetensors lets nobody but the owner read its files; a server of another user is to read these.
            shutil.copymode(partial / "config.json", file)
        copy_other_files(Path(folder), partial, {CONFIG})
        check_tokenizer(source, partial)
        write_export_manifest(partial)
