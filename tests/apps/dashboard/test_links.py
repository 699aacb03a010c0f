"""The links to a dashboard in a container."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.apps.dashboard.links import main
from paceline.calls.token import VARIABLE
from paceline.services.common.access.page_keys import Access, Role


def test_the_links_have_the_keys_that_the_dashboard_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("a" * 64 + "\n")
    monkeypatch.setenv(VARIABLE, str(path))
    said = CliRunner().invoke(main, ["127.0.0.1:7081"])
    assert said.exit_code == 0, said.output
    keys = re.findall(r"http://127\.0\.0\.1:7081/#key=(\w+)$", said.output, flags=re.M)
    assert [Access(path).role(f"Bearer {key}") for key in keys] == [Role.OPERATOR, Role.READER]


def test_without_a_token_there_are_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    said = CliRunner().invoke(main, ["127.0.0.1:7081"])
    assert said.exit_code == 1
    assert "with --token-file" in said.output
    assert "#key=" not in said.output
