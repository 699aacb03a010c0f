"""The place of a reward model and its version."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import InvalidInput, Unreadable
from paceline.files.storage import Folder
from paceline.reward.models.scorer import device_of, fetched, located
from paceline.reward.models.settings import ModelSettings


def test_the_newest_export_by_step(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "step-11").mkdir()  # not whole yet
    assert located(str(tmp_path)) == str(tmp_path / "step-10")
    assert located(str(tmp_path / "other")) == str(tmp_path / "other")


def test_a_folder_without_a_model_is_unreadable_and_a_hubs_name_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match=r"has no config\.json, and no export step-N"):
        located(str(tmp_path))
    assert located("org/model") == "org/model"


def test_a_gpu_that_the_worker_does_not_see_is_unreadable() -> None:
    with pytest.raises(Unreadable, match=r"device is 'cuda:97', but the worker sees \d+ GPUs"):
        device_of(ModelSettings(path="org/model", device="cuda:97"))


def test_the_version_changes_with_the_files(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    source, first = fetched(str(tmp_path))
    assert source == str(tmp_path)
    assert fetched(str(tmp_path)) == (source, first)
    os.utime(config, ns=(1, 1))
    assert fetched(str(tmp_path))[1] != first


def test_a_url_is_copied_to_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MODEL_CACHE", str(tmp_path / "cache"))
    exports = f"memory://{tmp_path.name}/exports"
    Folder(f"{exports}/step-3").write("config.json", b"{}")
    source, first = fetched(exports)
    assert (Path(source) / "config.json").read_bytes() == b"{}"
    assert first.startswith("step-3-")
    Folder(f"{exports}/step-4").write("config.json", b'{"a": 1}')
    source, second = fetched(exports)
    assert (Path(source) / "config.json").read_bytes() == b'{"a": 1}'
    assert second.startswith("step-4-")
    with pytest.raises(InvalidInput):
        fetched("nosuch://bucket/model")
