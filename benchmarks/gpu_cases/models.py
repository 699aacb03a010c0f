"""Models of the shapes of Qwen3 with random weights, written once for all cases."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

VOCABULARY = 151_936


def _shape(
    layers: int, hidden: int, mlp: int, heads: int, tied: bool, key_value_heads: int = 8, head_dim: int = 128
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40_960,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _shape(2, 64, 192, 4, True, 2, 16) | {"vocab_size": 512},
    "0.6B": _shape(28, 1_024, 3_072, 16, True),
    "1.7B": _shape(28, 2_048, 6_144, 16, True),
    "4B": _shape(36, 2_560, 9_728, 32, True),
    "8B": _shape(36, 4_096, 12_288, 32, False),
}
"""Sizes of Qwen3's dense models, by name; `tiny` checks the benchmark itself."""
BLOCK = 1 << 22


def model_folder(name: str, root: Path) -> Path:
    """Return the folder of a model, written before if it is not there: bfloat16 safetensors, never held as a whole."""
    folder = root / name
    if (folder / "written").exists():
        return folder
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from learner.checkpoints.model_folder import own_names
    from learner.checkpoints.safetensors_writer import SafetensorsWriter, TensorHeader

    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3Config(**SHAPES[name], dtype="bfloat16")
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model.tie_weights()
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    state = model.state_dict()
    headers = [TensorHeader(each, torch.bfloat16, tuple(state[each].shape)) for each in own_names(model)]
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    with SafetensorsWriter(folder, headers, 1 << 30) as writer:
        for number, header in enumerate(headers):
            numel, norm = math.prod(header.shape), header.name.endswith("norm.weight")
            for begin in range(0, numel, BLOCK):
                part = block.roll(977 * number + begin // BLOCK)[: numel - begin]
                writer.write(header.name, begin, torch.ones_like(part) if norm else part)
        writer.finish()
    (folder / "written").touch()
    return folder
