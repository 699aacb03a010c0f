"""A model that writes one text, whatever was asked: for tests that need tool calls in what a real engine samples.

Every token has one follower. The residual stream is the embedding of the last token alone, because the one layer adds
nothing to it, and the head maps each token to its follower. So a text whose pieces are tokens comes piece by piece.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

HIDDEN = 256
"""At least as many as there are tokens, so that embeddings are orthogonal."""


def write_chain_model(folder: Path, tokenizer: Any, chains: Sequence[Sequence[str]]) -> None:
    """Write a model with `tokenizer`, to which the pieces become tokens, into `folder`. A chain is the last character of a
    prompt, then the pieces that the model writes behind it, then the end of sequence."""
    pieces = dict.fromkeys(piece for _, *following in chains for piece in following)
    tokenizer.add_tokens(list(pieces))
    assert len(tokenizer) <= HIDDEN
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    layer: Any = model.model.layers[0]
    with torch.no_grad():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(len(tokenizer), HIDDEN))
        model.lm_head.weight.zero_()
        for start, *following in chains:
            (last,) = tokenizer(start, add_special_tokens=False)["input_ids"]
            for token in (*tokenizer.convert_tokens_to_ids(following), tokenizer.eos_token_id):
                model.lm_head.weight[token, last] = 10.0
                last = token
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
