"""Folders from which reward functions may be loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.bundle.allowed import refusal_of_files
from paceline.spec import RunSpec
from paceline.spec.reading import load_spec, parse_spec, spec_to_yaml, submitted_spec


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a spec's neighbours, beside one that is not its own."""
    for name in ("mine", "mine/below", "theirs"):
        (tmp_path / name).mkdir()
    for name in ("mine/f.py", "mine/below/f.py", "theirs/f.py"):
        (tmp_path / name).write_text("def f(completions, **_):\n    return [0.0] * len(completions)\n")
    return tmp_path / "mine"


def spec_with(folder: Path, function: str) -> RunSpec:
    """A spec that is read from a file in the folder and has this reward function."""
    tree: dict[str, Any] = {
        "policy": {"model_name": "none"},
        "data": {"train": "none"},
        "rewards": [{"function": function}],
    }
    (folder / "spec.yaml").write_text(yaml.safe_dump(tree))
    return load_spec(folder / "spec.yaml")


@pytest.mark.parametrize("function", ["f.py:f", "below/f.py:f", "exact_match"])
def test_a_file_below_the_specs_folder_and_a_built_in_are_taken(folder: Path, function: str) -> None:
    assert refusal_of_files(spec_with(folder, function)) == ""


@pytest.mark.parametrize("function", ["../theirs/f.py:f", "below/../../theirs/f.py:f"])
def test_a_file_elsewhere_is_refused_with_both_remedies(folder: Path, function: str) -> None:
    file = folder.parent / "theirs" / "f.py"
    assert refusal_of_files(spec_with(folder, function)) == (
        f"rewards.0.function: {file} is not below {folder}; move it there, or allow its folder with "
        f"--functions-from {file.parent}"
    )


def test_links_are_followed(folder: Path) -> None:
    (folder / "link.py").symlink_to(folder.parent / "theirs" / "f.py")
    (folder / "below" / "up").symlink_to(folder.parent / "theirs")
    for function in ("link.py:f", "below/up/f.py:f"):
        assert "theirs/f.py is not below" in refusal_of_files(spec_with(folder, function))
    # Also when only the one that refuses sees the link: the spec was resolved before it was there.
    spec = spec_with(folder, "f.py:f")
    (folder / "f.py").unlink()
    (folder / "f.py").symlink_to(folder.parent / "theirs" / "f.py")
    assert "theirs/f.py is not below" in refusal_of_files(spec)


def test_allowed_folders_replace_the_folder_of_the_spec(folder: Path) -> None:
    theirs = folder.parent / "theirs"
    assert refusal_of_files(spec_with(folder, "../theirs/f.py:f"), [theirs]) == ""
    assert "mine/f.py is not below" in refusal_of_files(spec_with(folder, "f.py:f"), [theirs])
    assert refusal_of_files(spec_with(folder, "f.py:f"), [theirs, folder]) == ""


def test_the_folder_survives_the_way_to_the_coordinator_and_a_second_reading(folder: Path) -> None:
    spec = spec_with(folder, "../theirs/f.py:f")
    assert submitted_spec(spec_to_yaml(spec)).folder == str(folder)
    (folder.parent / "theirs" / "resolved.yaml").write_text(spec_to_yaml(spec))
    assert load_spec(folder.parent / "theirs" / "resolved.yaml").folder == str(folder)


def test_a_spec_that_a_program_made_may_name_any_file_unless_folders_are_set(folder: Path) -> None:
    file = folder.parent / "theirs" / "f.py"
    spec = parse_spec(
        {
            "policy": {"model_name": "none"},
            "data": {"train": "none"},
            "rewards": [{"function": f"{file}:f"}],
        }
    )
    assert refusal_of_files(spec) == ""
    assert "theirs/f.py is not below" in refusal_of_files(spec, [folder])
