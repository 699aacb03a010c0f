"""Sizes of public models, as their config.json has them on the Hugging Face hub."""

from __future__ import annotations

from typing import Any


def _config(
    layers: int, hidden: int, mlp: int, heads: int, key_value_heads: int, vocabulary: int, **others: Any
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": False,
        **others,
    }


PUBLIC_CONFIGS = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _config(28, 1_536, 8_960, 12, 2, 151_936),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _config(30, 576, 1_536, 9, 3, 49_152, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": _config(36, 4_096, 12_288, 32, 8, 151_936, head_dim=128),
    "Qwen/Qwen3-32B": _config(64, 5_120, 25_600, 64, 8, 151_936, head_dim=128),
    "meta-llama/Llama-3.1-8B-Instruct": _config(32, 4_096, 14_336, 32, 8, 128_256),
    "meta-llama/Llama-3.3-70B-Instruct": _config(80, 8_192, 28_672, 64, 8, 128_256),
}
