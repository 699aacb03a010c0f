"""Exporting an adapter alone, as a folder that PEFT reads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from torch import Tensor

from paceline.learner.checkpoints.export_folder import written_beside
from paceline.learner.checkpoints.export_manifest import write_export_manifest
from paceline.models.export_origin import Origin
from paceline.spec import LoraSection
from paceline.weights.format.lora_names import A_SUFFIX, FINGERPRINT, PREFIX


def export_adapter(
    directory: str | os.PathLike[str],
    adapter: Mapping[str, Tensor],
    lora: LoraSection,
    model_name: str,
    *,
    replace: bool = False,
    origin: Origin | None = None,
) -> str | os.PathLike[str]:
    """Write `adapter` (as `gather_weights` gives it, whole) as a folder that `PeftModel.from_pretrained` reads. `origin` is the run
    that exports it, if any.

    Raises Conflict when `directory` exists; with `replace` only when it is no export.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().clone() for name, tensor in adapter.items() if name != FINGERPRINT}
    layers = [name.removeprefix(PREFIX).removesuffix(A_SUFFIX) for name in tensors if name.endswith(A_SUFFIX)]
    config = LoraConfig(
        r=lora.dim,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        # Whole names where a layer was left out: its last part alone would bring it back.
        target_modules=sorted(set(layers if lora.exclude_modules else (n.split(".")[-1] for n in layers))),
        base_model_name_or_path=model_name,
        task_type="CAUSAL_LM",
        inference_mode=True,
    )
    with written_beside(directory, replace=replace) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(partial))
        # safetensors lets nobody but the owner read its files; a server of another user is to read this one.
        shutil.copymode(partial / "adapter_config.json", partial / "adapter_model.safetensors")
        write_export_manifest(partial, origin)
    return directory
