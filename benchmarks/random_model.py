"""Model files with random weights, written for a benchmark without holding the model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

BLOCK = 1 << 22
"""Random numbers that are drawn; each tensor has them from another place on."""


def write_random_model(folder: Path, config: Any, shard_bytes: int) -> int:
    """Write config.json and bfloat16 safetensors of `shard_bytes` each, and return the number of parameters.

    `config` is a transformers config of a causal language model. Weights of norms are 1, the others near 0.02 · N(0, 1).
    """
    import torch
    from transformers import AutoModelForCausalLM

    from paceline.learner.checkpoints.model_folder import SafetensorsWriter, TensorHeader, own_names

    folder.mkdir(parents=True, exist_ok=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    state = model.state_dict()
    headers = [TensorHeader(name, torch.bfloat16, tuple(state[name].shape)) for name in own_names(model)]
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    with SafetensorsWriter(folder, headers, shard_bytes) as writer:
        for number, header in enumerate(headers):
            numel, is_norm = math.prod(header.shape), header.name.endswith("norm.weight")
            for begin in range(0, numel, BLOCK):
                part = block.roll(977 * number + begin // BLOCK)[: numel - begin]
                writer.write(header.name, begin, torch.ones_like(part) if is_norm else part)
        writer.finish()
    return sum(math.prod(header.shape) for header in headers)
