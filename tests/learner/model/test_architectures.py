"""Every architecture of docs/use/models.md, as a tiny random model: learner, export and native engine, against
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models_page
import pytest
from model_checks import check_all
from model_zoo import REFUSED, WORKING, Architecture

from paceline.errors import InvalidInput
from paceline.models.architectures import check_architecture


@pytest.mark.parametrize("architecture", WORKING, ids=lambda architecture: architecture.class_name)
def test_it_works(architecture: Architecture, tmp_path: Path) -> None:
    check_all(architecture, tmp_path)


@pytest.mark.parametrize(("family", "config"), REFUSED)
def test_it_is_refused_by_name(family: str, config: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"models of type '{config['model_type']}' are not supported"):
        check_architecture(config, "policy.model_name 'm'")


def test_the_page_lists_what_is_tested() -> None:
    """The results of the page's rows are those of the tests above, which its generator repeats."""
    assert models_page.PAGE.read_text() == models_page.page(dict.fromkeys(WORKING, models_page.WORKS))
