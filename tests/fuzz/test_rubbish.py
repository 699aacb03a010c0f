"""Every file of a command, replaced by rubbish of every kind, is answered with a sentence that names it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from command_line import paceline
from hostile_files import bounded_memory, limited
from registry_place import make_place
from rubbish import CASES, PLACES, fill, put


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = make_place(tmp_path_factory.mktemp("valid"))
    fill(place)
    return place.folder


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_rubbish_is_answered_with_a_sentence(
    name: str, kind: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "no permission" and os.geteuid() == 0:
        pytest.skip("root may read every file")
    place = PLACES[name]
    folder = tmp_path / "copy"
    shutil.copytree(workplace, folder, symlinks=True)
    monkeypatch.chdir(folder)
    put(kind, folder / place.file)
    with bounded_memory(), limited():
        result = paceline(*place.command, coordinator="")  # the ledger in `runs`, no coordinator
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in (1, 2), result.output
    said = " ".join(result.stderr.split())
    assert "Traceback" not in said
    words = (place.named or Path(place.file).name).split("|")
    assert any(word in said for word in words), said
