"""Pieces of a model that is whole on one rank; sharded ones are in the tests with ranks."""

from __future__ import annotations

import torch
from tiny_models import tiny_qwen3

from paceline.learner.weights.stream import export_weights, pieces


def test_the_pieces_are_every_element_once() -> None:
    model = tiny_qwen3(tie_word_embeddings=True)
    weights = export_weights(model)
    assert weights.keys() == model.state_dict().keys() - {"lm_head.weight"}
    found: dict[str, list[torch.Tensor]] = {}
    for name, first_element, values in pieces(weights, torch.bfloat16, piece_bytes=700):
        assert first_element == sum(len(part) for part in found.setdefault(name, []))
        assert values.nbytes <= 700
        found[name].append(values)
    for name, weight in weights.items():
        assert torch.equal(torch.cat(found[name]), weight.tensor.bfloat16().view(-1))
    same = {name: values for name, _, values in pieces(weights, None)}
    assert same["model.norm.weight"].dtype == torch.float32
