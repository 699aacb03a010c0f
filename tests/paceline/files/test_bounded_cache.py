"""The cache of folders: bounded, safe between threads and processes, with errors that name the remedy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.errors import InvalidInput, Unavailable, Unreadable
from paceline.files.bounded_cache import BoundedCache, CacheKind, HeldFolder

KIND = CacheKind("model", default_mb=1, wait_s=0.2)


def written(size: int) -> Callable[[Path], None]:
    return lambda folder: (folder / "data").write_bytes(b"x" * size) and None


def opened(cache: BoundedCache, name: str, size: int = 100, used_s: float | None = None) -> HeldFolder:
    held = cache.open(name, size, Path.is_dir, written(size))
    if used_s is not None:
        os.utime(held.root.with_suffix(".lock"), (used_s, used_s))
    return held


def test_the_least_recently_used_entry_makes_room(tmp_path: Path) -> None:
    cache = BoundedCache(tmp_path, 250, KIND)
    for name, used_s in (("a", 100), ("b", 50)):
        opened(cache, name, used_s=used_s).close()
    with opened(cache, "c"):
        assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["a", "c"]


def test_a_disk_without_room_is_made_room_on(tmp_path: Path) -> None:
    def free_bytes(folder: Path) -> int:
        return 150 - sum(file.stat().st_size for file in folder.glob("*/data"))

    cache = BoundedCache(tmp_path, 1000, KIND, free_bytes)
    opened(cache, "a").close()
    with opened(cache, "b"):
        assert not (tmp_path / "a").exists()
        with pytest.raises(Unavailable, match=r"has 0 MB free; set PACELINE_MODEL_CACHE to a folder with room"):
            opened(cache, "c")


def test_a_failed_filling_leaves_nothing_and_the_size_free(tmp_path: Path) -> None:
    cache = BoundedCache(tmp_path, 150, KIND)

    def fail(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        cache.open("a", 100, Path.is_dir, fail)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    opened(cache, "b").close()
    assert (tmp_path / "b").is_dir()


def test_a_damaged_entry_is_made_again_while_it_is_read(tmp_path: Path) -> None:
    cache = BoundedCache(tmp_path, 1000, KIND)
    with opened(cache, "a", 3) as held, (held.root / "data").open("rb") as reader:
        (held.root / "damage").touch()
        with cache.open("a", 3, lambda root: not (root / "damage").exists(), written(3)) as again:
            assert not (again.root / "damage").exists()
        assert reader.read() == b"xxx"


def test_folders_of_an_interrupted_replacement_are_removed(tmp_path: Path) -> None:
    cache = BoundedCache(tmp_path, 1000, KIND)
    opened(cache, "a", 3).close()
    (tmp_path / "a" / "damage").touch()
    (tmp_path / "a.damaged").mkdir()
    (tmp_path / "a.damaged" / "old").touch()
    with cache.open("a", 3, lambda root: not (root / "damage").exists(), written(3)) as again:
        assert sorted(path.name for path in again.root.iterdir()) == ["data"]
    assert not (tmp_path / "a.damaged").exists()


def test_one_fills_while_others_wait_and_a_waiter_gives_up(tmp_path: Path) -> None:
    cache = BoundedCache(tmp_path, 1000, KIND)
    begun, go_on = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        begun.set()
        go_on.wait(30)

    thread = threading.Thread(target=lambda: cache.open("a", 1, Path.is_dir, slow).close())
    thread.start()
    assert begun.wait(30)
    with pytest.raises(Unavailable, match=r"filling the model's folder for 0\.2 s"):
        opened(cache, "a")
    go_on.set()
    thread.join(30)
    with opened(cache, "a") as held:
        assert not (held.root / "data").exists()  # it is the first one's


def test_the_rest_of_a_process_that_died_goes(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from paceline.files.bounded_cache import *\n"
        "cache = BoundedCache(Path(sys.argv[1]), 150, CacheKind('model', 1, 1))\n"
        "cache.open('a', 100, Path.is_dir, lambda folder: ((folder / 'half').touch(), os._exit(3)))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 3
    assert (tmp_path / "a.partial" / "half").exists()
    with opened(BoundedCache(tmp_path, 150, KIND), "b"):
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["b"]


def test_the_environment_names_folder_and_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with opened(KIND.of_user("models"), "a") as held:
        assert held.root == tmp_path / "paceline" / "models" / "a"
    with pytest.raises(Unreadable, match=r"are 2 MB, and .* may hold 1 MB; raise PACELINE_MODEL_CACHE_MB"):
        opened(KIND.of_user("models"), "b", 2 << 20)
    monkeypatch.setenv("PACELINE_MODEL_CACHE_MB", "-1")
    with pytest.raises(InvalidInput, match="PACELINE_MODEL_CACHE_MB is '-1'; set it to a number of MB"):
        KIND.of_user("models")
    monkeypatch.delenv("PACELINE_MODEL_CACHE_MB")
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_MODEL_CACHE", str(tmp_path / "file"))
    with pytest.raises(Unreadable, match=r"the model cannot be kept in .*; set PACELINE_MODEL_CACHE to a folder"):
        opened(KIND.of_user("models"), "a")
