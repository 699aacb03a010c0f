"""The list of all keys: each has a sentence, a type in words and a default that the spec accepts."""

from __future__ import annotations

import yaml

from paceline.spec.keys import dotted, keys, keys_of


def test_every_key_has_a_sentence() -> None:
    assert [path for path, key in keys().items() if not key.description.endswith((".", ")"))] == []


def test_types_are_words() -> None:
    expected = {
        "grpo.seed": "integer ≥ 0",
        "policy.optimizer.lr": "number > 0",
        "policy.optimizer.betas": "2 values (number ≥ 0, < 1)",
        "policy.generation.top_p": "number > 0, ≤ 1",
        "cluster.learner_gpus": "list (integer ≥ 0)",
        "data.validation": "text or list (text) or null",
        "policy.precision": "`auto`, `float32`, `bfloat16`, `float16`",
        "loss_fn.geometric_mask": "2 values (number > 0) or null",
        "rewards": "list of sections",
        "rewards.N.kwargs": "mapping",
        "policy.generation": "section",
    }
    assert {path: keys()[path].type_text for path in expected} == expected
    assert [path for path, key in keys().items() if "<" in key.type_text.replace("< ", "")] == []


def test_defaults_are_yaml() -> None:
    shown = {path: key.default_text for path, key in keys().items() if key.section is None}
    assert shown["policy.model_name"] == "required"
    assert shown["policy.optimizer.betas"] == "[0.9, 0.999]"
    assert shown["data.validation"] == "null"
    assert [path for path, text in shown.items() if text != "required" and yaml.safe_load(text) is ...] == []


def test_keys_of_a_section_and_of_an_item() -> None:
    assert "rewards" in keys_of("")
    assert keys_of("rewards.N")[:2] == ["function", "name"]
    assert dotted(("rewards", 1, "weight")) == "rewards.N.weight"
