"""Folders of caches, and those that somebody else could change: as root, with folders of another user."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import Unavailable, Unreadable
from paceline.files import bounded_cache
from paceline.files.bounded_cache import BoundedCache, CacheKind, spool_folder, use_own_compiled_code
from paceline.host.own_folder import VARIABLE, own_folder
from paceline.reward.endpoints.cache import AnswerCache
from paceline.weights.hosts.local_socket import listen

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make another user's files")
STRANGER = 65534
REMEDY = "make a folder with `mkdir -m 700` inside a folder of your own, and set PACELINE_X to it"


def test_a_missing_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    made = own_folder(tmp_path / "a" / "b", "PACELINE_X")
    assert [place.stat().st_mode & 0o777 for place in (made, made.parent)] == [0o700, 0o700]
    assert own_folder(made, "PACELINE_X") == made


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_folder_in_which_others_may_write_is_refused_with_the_remedy(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    if mode == 0o770:
        if os.geteuid() != 0:
            pytest.skip("needs root, to give a folder to another group")
        os.chown(folder, 0, STRANGER)
    folder.chmod(mode)
    with pytest.raises(Unreadable, match=REMEDY) as caught:
        own_folder(folder, "PACELINE_X")
    assert f"may write in {folder} (mode {mode:04o}" in str(caught.value)


def test_a_folder_below_one_in_which_others_may_rename_is_refused_and_below_a_sticky_one_used(tmp_path: Path) -> None:
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(0o777)
    with pytest.raises(Unreadable, match="every user may write in"):
        own_folder(parent / "mine", "PACELINE_X")
    parent.chmod(0o1777)
    assert own_folder(parent / "mine", "PACELINE_X")


def test_a_containers_volume_may_be_named_as_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    monkeypatch.setenv(VARIABLE, f"/nowhere:{volume}")
    assert own_folder(volume, "PACELINE_X")
    assert own_folder(volume / "below", "PACELINE_X")


@ROOT
@pytest.mark.parametrize("place", ["the folder", "above", "a link to it"])
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, place: str) -> None:
    """Also a link of another user, who can lead it elsewhere, to a folder of this one."""
    (tmp_path / "theirs").mkdir(mode=0o700)
    folder = tmp_path / "theirs" / "mine" if place == "above" else tmp_path / "theirs"
    folder.mkdir(exist_ok=True)
    if place == "a link to it":
        folder = tmp_path / "link"
        folder.symlink_to(tmp_path / "theirs")
        os.chown(folder, STRANGER, STRANGER, follow_symlinks=False)
    else:
        os.chown(tmp_path / "theirs", STRANGER, STRANGER)
    with pytest.raises(Unreadable, match=f"user {STRANGER} owns"):
        own_folder(folder, "PACELINE_X")


@pytest.mark.parametrize("target", ["{}/open/hop", "up/../../open/hop", "open/hop"])
def test_every_link_on_the_way_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    """Somebody who may write in a folder with an intermediate link can lead the path elsewhere."""
    for name in ("real", "open", "deep/below"):
        (tmp_path / name).mkdir(mode=0o700, parents=True)
    (tmp_path / "up").symlink_to("deep/below")
    (tmp_path / "open" / "hop").symlink_to(tmp_path / "real")
    (tmp_path / "cache").symlink_to(target.format(tmp_path))
    assert own_folder(tmp_path / "cache", "PACELINE_X")
    (tmp_path / "open").chmod(0o777)
    for folder in (tmp_path / "cache", tmp_path / "cache" / "below"):
        with pytest.raises(Unreadable, match=f"every user may write in .*open.*name .*open in {VARIABLE} instead"):
            own_folder(folder, "PACELINE_X")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "real"))
    with pytest.raises(Unreadable, match="every user may write in"):
        own_folder(tmp_path / "cache", "PACELINE_X")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    assert own_folder(tmp_path / "cache", "PACELINE_X")


def test_the_remedy_for_a_folder_above_is_to_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a project's folder that its group may write; the folder below it is still judged."""
    project, mine = tmp_path / "project", tmp_path / "project" / "mine"
    project.mkdir()
    project.chmod(0o777)
    with pytest.raises(Unreadable, match=f"if you trust whoever may write there, name {project} in {VARIABLE} instead"):
        own_folder(mine, "PACELINE_X")
    monkeypatch.setenv(VARIABLE, str(project))
    assert own_folder(mine, "PACELINE_X")
    mine.chmod(0o777)
    with pytest.raises(Unreadable, match=r"set PACELINE_X to it$"):
        own_folder(mine, "PACELINE_X")


def cached(folder: Path) -> None:
    kind = CacheKind("bundle", 1, 1.0)
    BoundedCache(folder, 1 << 20, kind).open("entry", 1, lambda _: False, lambda _: None)


def spooled(folder: Path) -> None:
    spool_folder()


def compiled(folder: Path) -> None:
    use_own_compiled_code()


def listening(folder: Path) -> None:
    listen(f"{folder}/relay.sock")


@pytest.mark.parametrize("use", [cached, spooled, compiled, listening])
def test_caches_spool_compiled_code_and_sockets_are_opened_so(
    use: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o777)
    for variable in (bounded_cache.FOLDER_VARIABLE, bounded_cache.COMPILED_VARIABLE):
        monkeypatch.setenv(variable, str(folder))
    with pytest.raises((Unreadable, Unavailable), match="mkdir -m 700"):
        use(folder)
    assert list(folder.iterdir()) == []


def test_a_judges_answers_are_not_read_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tmp_path.chmod(0o777)
    cache = AnswerCache(tmp_path, 1 << 20)
    cache.put("digest", "an answer")
    assert cache.get("digest") is None
    assert list(tmp_path.iterdir()) == []
    assert "mkdir -m 700" in caplog.text
