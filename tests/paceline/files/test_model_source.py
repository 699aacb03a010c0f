"""Sources of models: folders, URLs with their copies in the cache, names on the hub."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from paceline.errors import InvalidInput, Unreadable
from paceline.files.model_source import HELD_FOLDERS, model_source


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = f"memory://{uuid4().hex}/model"
    put(url, "config.json", b"{}")
    put(url, "vocab.txt", b"a")
    put(url, "model.safetensors", b"weights")
    put(url, "model.safetensors.index.json", b"{}")
    return url


def put(url: str, name: str, data: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(f"{url}/{name}", data)


def names(folder: str) -> set[str]:
    return {name for name in os.listdir(folder) if not name.startswith(".")}


def test_folders_and_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert model_source(str(tmp_path)) == str(tmp_path)
    assert model_source("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert model_source(f"~/{tmp_path.name}") == str(tmp_path)
    with pytest.raises(Unreadable, match=r"value\.model_name './nowhere': no such folder"):
        model_source("./nowhere", "value.model_name")


def test_a_urls_small_files_are_copied_and_its_weights_on_request(url: str) -> None:
    folder = model_source(url)
    assert names(folder) == {"config.json", "vocab.txt", "model.safetensors.index.json"}
    assert model_source(f"{url}/") == folder
    whole = model_source(url, weights=True)
    assert names(whole) == names(folder) | {"model.safetensors"}
    assert Path(whole, "model.safetensors").read_bytes() == b"weights"


def test_another_version_at_the_url_is_another_folder(url: str) -> None:
    folder = model_source(url)
    before = Path(folder, "config.json").stat().st_ino
    assert model_source(url) == folder
    assert Path(folder, "config.json").stat().st_ino == before  # not copied again
    put(url, "vocab.txt", b"b")
    fsspec.filesystem("memory").rm_file(f"{url}/model.safetensors.index.json")
    changed = model_source(url)
    assert Path(changed, "vocab.txt").read_bytes() == b"b"
    assert names(changed) == {"config.json", "vocab.txt"}
    assert Path(folder, "vocab.txt").read_bytes() == b"a"  # who reads the old one goes on


def test_a_copy_that_is_damaged_is_made_again(url: str) -> None:
    folder = Path(model_source(url))
    (folder / ".copies.json").write_text("[")
    (folder / "config.json").unlink()
    assert (Path(model_source(url)) / "config.json").read_bytes() == b"{}"
    (folder / "vocab.txt").write_bytes(b"x")
    assert (Path(model_source(url)) / "vocab.txt").read_bytes() == b"a"


def test_the_last_requested_folders_stay_and_others_make_room(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_MODEL_CACHE", str(tmp_path / "models"))
    monkeypatch.setenv("PACELINE_MODEL_CACHE_MB", "1")
    folders = []
    for letter in range(HELD_FOLDERS + 2):  # the cache has room for one less
        put(url, "vocab.txt", bytes([letter]) * 60_000)
        folders.append(Path(model_source(url)))
    assert [folder.is_dir() for folder in folders] == [False, *[True] * (HELD_FOLDERS + 1)]
    put(url, "vocab.txt", b"d" * 1_100_000)
    with pytest.raises(
        Unreadable,
        match=r"model_name 'memory:.*: the model's files are 1 MB, and .* raise PACELINE_MODEL_CACHE_MB",
    ):
        model_source(url)


def test_urls_without_a_model(url: str) -> None:
    with pytest.raises(Unreadable, match=r"policy\.model_name 'memory://nothing': no such folder with a config"):
        model_source("memory://nothing")
    with pytest.raises(InvalidInput, match=r"policy\.model_name 'nope://x' cannot be used"):
        model_source("nope://x")
