"""Every architecture of docs/use/models.md, as a tiny random model: learner and export, against transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from model_checks import check_all
from model_zoo import REFUSED, WORKING, Architecture

from paceline.errors import InvalidInput
from paceline.models.architectures import check_architecture


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(each, id=each.class_name, marks=() if each.always else (pytest.mark.slow, pytest.mark.merge))
        for each in WORKING
    ],
)
def test_it_works(architecture: Architecture, tmp_path: Path) -> None:
    check_all(architecture, tmp_path)


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
