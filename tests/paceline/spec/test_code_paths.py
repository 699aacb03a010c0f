"""A spec's files of code: read relative to it, collected into a bundle, and found in an unpacked one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.bundle.allowed import refusal_of_files
from paceline.bundle.collecting import collect, collect_again
from paceline.bundle.manifest import localized, with_original_paths
from paceline.spec import RunSpec
from paceline.spec.reading import code_paths, parse_spec, spec_from_yaml, spec_to_yaml, with_code_paths

ENVIRONMENTS: dict[str, dict[str, Any]] = {
    "one": {"class": "env.py:Calculator"},
    "several": {"class": {"a": "env.py:Calculator", "b": "env.py:Search"}},
    "agent": {"agent": "env.py:solve", "train_call": "env.py:train_call"},
}


def make(folder: Path, environment: dict[str, Any]) -> RunSpec:
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "reward.py").write_text("def f(completions, **kw): ...\n")
    (folder / "env.py").write_text("import tools\nclass Calculator: ...\n")
    (folder / "tools.py").write_text("X = 1\n")
    tree: dict[str, Any] = {
        "policy": {"model_name": "some/model"},
        "data": {"train": "train.jsonl"},
        "rewards": [{"function": "reward.py:f"}, {"function": "exact_match"}],
        "environment": environment,
    }
    return parse_spec(tree, base=folder)


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_code_is_named_by_field_with_absolute_files(tmp_path: Path, kind: str) -> None:
    spec = make(tmp_path, ENVIRONMENTS[kind])
    expected = {"rewards.0.function": f"{tmp_path}/reward.py:f"}
    match kind:
        case "one":
            expected["environment.class"] = f"{tmp_path}/env.py:Calculator"
        case "several":
            expected["environment.class.a"] = f"{tmp_path}/env.py:Calculator"
            expected["environment.class.b"] = f"{tmp_path}/env.py:Search"
        case "agent":
            expected["environment.agent"] = f"{tmp_path}/env.py:solve"
            expected["environment.train_call"] = f"{tmp_path}/env.py:train_call"
    assert code_paths(spec) == expected
    assert code_paths(spec_from_yaml(spec_to_yaml(spec))) == expected


@pytest.mark.parametrize("kind", ENVIRONMENTS)
def test_an_environment_travels_with_its_imports(tmp_path: Path, kind: str) -> None:
    spec = make(tmp_path, ENVIRONMENTS[kind])
    bundle = collect(spec)
    code = [file.path for file in bundle.manifest.files if file.kind == "code"]
    assert code == ["folder/env.py", "folder/reward.py", "folder/tools.py"]
    assert bundle.warnings == ()

    unpacked = localized(spec, bundle.manifest, Path("/cache/1"))
    moved = {field: code.replace(str(tmp_path), "/cache/1/folder") for field, code in code_paths(spec).items()}
    assert code_paths(unpacked) == moved
    assert unpacked.folder == "/cache/1"
    text = "/cache/1/folder/env.py has no class 'Calculator'"
    assert with_original_paths(text, spec, Path("/cache/1")) == f"{tmp_path}/env.py has no class 'Calculator'"

    (tmp_path / "tools.py").write_text("X = 2\n")
    again = collect_again(spec, bundle.manifest)
    assert again is not None
    assert again.manifest.digest != bundle.manifest.digest
    (tmp_path / "env.py").unlink()
    assert collect_again(spec, bundle.manifest) is None, "this machine does not have the code any more"


def test_an_environment_from_another_folder_is_refused_by_name(tmp_path: Path) -> None:
    spec = make(tmp_path, {"class": "../env.py:Calculator"})
    assert refusal_of_files(spec).startswith(f"environment.class: {tmp_path.parent}/env.py is not below {tmp_path}")


def test_a_file_that_is_not_here_is_named(tmp_path: Path) -> None:
    spec = make(tmp_path, {"agent": "no_such.py:solve"})
    (warning,) = collect(spec).warnings
    assert warning.startswith(f"environment.agent: no file '{tmp_path}/no_such.py' is on this machine")
    assert "environment workers' hosts" in warning


def test_every_code_path_changes(tmp_path: Path) -> None:
    for environment in ENVIRONMENTS.values():
        spec = make(tmp_path, environment)
        changed = with_code_paths(spec, str.upper)
        assert code_paths(changed) == {field: code.upper() for field, code in code_paths(spec).items()}
        assert changed.rewards[1].function == "exact_match"
