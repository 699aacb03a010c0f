"""Every architecture of docs/use/models.md, as a tiny random model: learner and export, against transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from model_checks import check_all, loss_of, samples
from model_zoo import REFUSED, WORKING, Architecture
from ranks import run_ranks
from safetensors.torch import load_file

from paceline.errors import InvalidInput
from paceline.models.architectures import check_architecture

ROUNDING = 4e-5
"""Largest difference between gradients in float32, as a part of a parameter's largest gradient."""


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, id=each.class_name, marks=() if each.always else (pytest.mark.slow, pytest.mark.merge))
        for each in WORKING
    ],
)
def test_it_works(architecture: Architecture, tmp_path: Path) -> None:
    check_all(architecture, tmp_path)


@pytest.mark.merge
@pytest.mark.slow
def test_two_ranks_have_the_gradients_of_one(tmp_path: Path) -> None:
    for architecture in WORKING:
        architecture.make().save_pretrained(tmp_path / architecture.class_name)
    run_ranks("sharded_rank.py", 2, tmp_path)
    differences = {}
    for architecture in WORKING:
        _, expected = loss_of(tmp_path / architecture.class_name, samples())
        found = load_file(tmp_path / f"{architecture.class_name}.safetensors")
        assert found.keys() == {name for name, gradient in expected.items() if gradient is not None}
        differences[architecture.class_name] = max(
            float((2 * gradient - whole).abs().max() / whole.abs().max().clamp(min=1.0))
            for name, gradient in found.items()
            if (whole := expected[name]) is not None
        )
    assert {name: most for name, most in differences.items() if most > ROUNDING} == {}


@pytest.mark.parametrize(("family", "config"), REFUSED)
def test_it_is_refused_by_name(family: str, config: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"models of type '{config['model_type']}' are not supported"):
        check_architecture(config, "policy.model_name 'm'")


def test_the_page_lists_what_is_tested() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "use" / "models.md").read_text(encoding="utf-8")
    rows = [f"| {each.family} | `{each.class_name}ForCausalLM` | {each.remark} |" for each in WORKING]
    for family, config in REFUSED:
        with pytest.raises(InvalidInput) as refusal:
            check_architecture(config, "")
        reason = str(refusal.value).split("not supported: ")[1].removesuffix("; see docs/use/models.md")
        rows.append(f"| {family} | `{config['model_type']}` | {reason} |")
    assert [row for row in rows if row not in page] == []
    assert len(re.findall(r"^\| .* \| `\w+` \| .* \|$", page, flags=re.M)) == len(rows)
