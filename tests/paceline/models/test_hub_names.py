"""Remedies for a name that was not found on the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.models.loading import hub_remedy


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("models/foo", "the name looks like a path and was used as a name on the hub; write ./models/foo"),
        ("a/b/c", "write ./a/b/c"),
        ("mine/foo", "write ./mine/foo"),
        ("mine", "name the files in that folder (./folder/*.jsonl)"),
        (".", "or a folder made by `save_to_disk`"),
        ("./foo", "there is no such folder"),
        ("/data/foo", "there is no such folder"),
        ("Qwen/Qwen2.5-0.5B", "HF_HUB_OFFLINE=1"),
        ("gpt2", "HF_HUB_OFFLINE=1"),
    ],
)
def test_the_remedy_distinguishes_a_path_from_a_name_on_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert remedy in hub_remedy(name)
