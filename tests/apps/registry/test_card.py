"""The model card, read back by huggingface_hub: evaluations as metadata, lineage and gate as text."""

from __future__ import annotations

from huggingface_hub import ModelCard

from paceline.apps.registry.folder import card_text
from paceline.apps.registry.statement import Lineage

EVALUATION = {
    "name": "gsm8k",
    "digest": "abc",
    "problems": 30,
    "k": 4,
    "metrics": {"reward": {"value": 0.5, "low": 0.4, "high": 0.6}},
}
VERDICT = {"outcome": "failed", "reasons": ["reward differs by -0.5"]}


def test_the_hub_reads_the_evaluations() -> None:
    earlier = "---\nlicense: mit\n---\n\n# Before\n\ntext"
    card = ModelCard(card_text("sums", 2, Lineage("run-1", 1, 7, "c"), "org/base", [EVALUATION], [VERDICT], earlier))
    assert card.data.base_model == "org/base"
    (result,) = card.data.eval_results or []
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("gsm8k", "reward", 0.5)
    assert "in the run `run-1`, session 1, 7 steps" in card.text
    assert "- the run was named at registration, because the files name none\n" in card.text
    assert "| reward | 0.5000 | 0.4000 to 0.6000 |" in card.text
    assert "Gate: failed.\n- reward differs by -0.5" in card.text
    assert card.text.endswith("## Card of the exported folder\n\n# Before\n\ntext\n")


def test_a_model_from_elsewhere_has_a_card_too() -> None:
    card = ModelCard(card_text("sums", 1, Lineage(), "", [], []))
    assert card.data.eval_results is None
    assert "Trained by Paceline" not in card.text
    assert "Gate: no verdict." in card.text
