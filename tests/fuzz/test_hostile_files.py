"""A short form of the campaign of hostile files: no command ends with a traceback, or not at all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hostile_changes import changed, changed_value
from hostile_files import attack, cases

ROUNDS = 3


@pytest.mark.slow
def test_changed_files_are_answered_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = {case.name: attack(case, ROUNDS, seed=5) for case in cases(tmp_path)}
    assert len(found) > 20
    assert {name: faults for name, faults in found.items() if faults} == {}


def test_changes_are_made_again_from_their_seed() -> None:
    content, value = b'{"a": [1, 2], "b": {"c": null}}', {"a": [1, 2], "b": {"c": None}}
    for change, before in ((changed, content), (changed_value, value)):
        made = [change(before, random.Random(seed)) for seed in range(50)]  # type: ignore[operator]
        assert made == [change(before, random.Random(seed)) for seed in range(50)]  # type: ignore[operator]
        assert sum(each != before for each in made) > 40
    assert value == {"a": [1, 2], "b": {"c": None}}
