"""Sizes of models, against those worked out by hand for the shape of Qwen2.5-0.5B."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_shapes import HALF_BILLION, LAYER, PARAMETERS

from paceline.models.shape import read_config, read_shape, shape_of


def test_parameters_are_those_of_the_shape() -> None:
    shape = shape_of(HALF_BILLION)
    assert shape is not None
    assert shape.parameters == PARAMETERS
    assert shape.layer_parameters == LAYER
    assert shape.tied
    assert 493 < shape.parameters / 1e6 < 495
    untied = shape_of({**HALF_BILLION, "tie_word_embeddings": False})
    assert untied is not None
    assert untied.parameters == PARAMETERS + 151_936 * 896
    experts = shape_of({**HALF_BILLION, "num_experts": 8, "moe_intermediate_size": 64, "num_experts_per_tok": 2})
    assert experts is not None
    assert experts.mlp == 128
    assert experts.experts_per_token == 2
    assert experts.parameters == PARAMETERS + 24 * (3 * 896 * (512 - 4_864) + 8 * 896)


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", "no json", '{"num_hidden_layers": "many"}', json.dumps(HALF_BILLION | {"hidden_size": 0})],
)
def test_a_config_that_tells_nothing_gives_no_shape(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    assert read_shape(str(tmp_path)) is None


def test_a_name_on_the_hub_that_is_not_cached_gives_no_config() -> None:
    assert read_config("paceline-tests/no-such-model") is None
