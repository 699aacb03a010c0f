"""Folders of exports: whole or missing, replacing only earlier exports, and no left-overs of dead processes."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import fsspec
import pytest

from paceline.errors import Conflict, Unavailable
from paceline.files.names import EXPORT_MANIFEST
from paceline.files.storage import Folder
from paceline.learner.checkpoints import export_folder
from paceline.learner.checkpoints.export_folder import NAME, remove_left_overs, written_beside


def export(directory: Path, content: str, *, replace: bool = True) -> None:
    with written_beside(directory, replace=replace) as partial:
        (partial / "config.json").write_text(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(params=[True, False], ids=["exchanged", "renamed"], autouse=True)
def exchange(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(export_folder, "_exchange", lambda one, other: False)


def test_an_earlier_export_is_replaced_whole(tmp_path: Path) -> None:
    export(tmp_path / "exports" / "now", "1")
    (tmp_path / "exports" / "now" / "more.bin").write_text("of the first alone")
    export(tmp_path / "exports" / "now", "2")
    assert names(tmp_path / "exports") == ["now"]
    assert names(tmp_path / "exports" / "now") == ["config.json"]
    assert (tmp_path / "exports" / "now" / "config.json").read_text() == "2"
    with pytest.raises(Conflict, match="never overwrites"):
        export(tmp_path / "exports" / "now", "3", replace=False)


def test_one_that_fails_leaves_the_earlier_one_and_nothing_else(tmp_path: Path) -> None:
    export(tmp_path / "now", "1")

    def fill_up() -> None:
        with written_beside(tmp_path / "now", replace=True) as partial:
            (partial / "config.json").write_text("2")
            raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        fill_up()
    assert names(tmp_path) == ["now"]
    assert (tmp_path / "now" / "config.json").read_text() == "1"


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_no_export_is_never_replaced(tmp_path: Path, kind: str) -> None:
    place, kept = tmp_path / "checkpoints", tmp_path / "kept"
    kept.mkdir()
    (kept / "config.json").write_text("of somebody else")
    if kind == "folder":
        (place / "1-4").mkdir(parents=True)
    elif kind == "file":
        place.write_text("metrics")
    else:
        place.symlink_to(kept)
    with pytest.raises(Conflict, match="is not an export; give the export another name"):
        export(place, "1")
    assert names(tmp_path) == ["checkpoints", "kept"]
    assert (kept / "config.json").read_text() == "of somebody else"


def test_what_the_dead_have_left_is_removed_and_what_the_living_write_is_not(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    left = [f".now.partial-{dead.pid}", f".export.partial-{os.getpid()}", f".old.replaced-{dead.pid}"]
    others = [f".now.partial-{os.getppid()}", ".hidden", "now.partial-1"]
    for name in (*left, *others):
        (tmp_path / name).mkdir()
    remove_left_overs(tmp_path)
    assert names(tmp_path) == sorted([*others, "old"])  # it died between two renames
    remove_left_overs(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "allowed"),
    [("now", True), ("step-12.5_x", True), ("x" * 64, True), ("x" * 65, False), ("", False)]
    + [(name, False) for name in ("..", ".now", "-now", "a/b", "a\n", "now ", "é")],
)
def test_names(name: str, allowed: bool) -> None:
    assert bool(NAME.fullmatch(name)) == allowed


def export_to(url: str, *files: str, replace: bool = True) -> None:
    with written_beside(url, replace=replace) as partial:
        for name in files:
            (partial / name).write_text(name)


def test_an_export_to_a_store_has_its_manifest_last_and_replaces_only_exports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_SPOOL", str(tmp_path))
    url, store = f"memory://{uuid.uuid4().hex}/now", fsspec.filesystem("memory")
    written: list[str] = []
    put = Folder.put
    monkeypatch.setattr(Folder, "put", lambda self, name, path: (written.append(name), put(self, name, path)))
    export_to(url, EXPORT_MANIFEST, "config.json", "model.safetensors", "old.txt", replace=False)
    assert written == ["model.safetensors", "old.txt", "config.json", EXPORT_MANIFEST]
    with pytest.raises(Conflict, match="never overwrites"):
        export_to(url, "config.json", replace=False)
    export_to(url, EXPORT_MANIFEST, "config.json")
    assert set(Folder(url).files()) == {EXPORT_MANIFEST, "config.json"}
    store.pipe_file(f"{url}-2/1-4/manifest.json", b"")
    with pytest.raises(Conflict, match="is not an export"):
        export_to(f"{url}-2", "config.json")
    assert names(tmp_path / "exports") == []


def test_an_export_that_breaks_off_in_a_store_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_SPOOL", str(tmp_path))
    url = f"memory://{uuid.uuid4().hex}/now"
    export_to(url, EXPORT_MANIFEST, "config.json")

    def away(*_: object) -> None:
        raise RuntimeError("connection refused")

    monkeypatch.setattr(Folder, "put", away)
    with pytest.raises(Unavailable, match="cannot be written: RuntimeError: connection refused"):
        export_to(url, EXPORT_MANIFEST, "config.json")
    assert not Folder(url).exists(EXPORT_MANIFEST)
