"""Making bundles: the files that travel, and refusals with the field's name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.bundle.collecting import collect
from paceline.errors import SpecError
from paceline.spec import RunSpec
from paceline.spec.reading import parse_spec


def make(folder: Path, source: str = "import helper\ndef f(completions, **kw): ...\n", **sections: Any) -> RunSpec:
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "reward.py").write_text(source)
    (folder / "helper.py").write_text("X = 1\n")
    tree: dict[str, Any] = {
        "policy": {"model_name": "some/model"},
        "data": {"train": "train.jsonl"},
        "rewards": [{"function": "reward.py:f"}],
    }
    return parse_spec(tree | sections, base=folder)


def paths(spec: RunSpec) -> list[str]:
    return [file.path for file in collect(spec).manifest.files]


def test_functions_neighbours_and_data_travel(tmp_path: Path) -> None:
    bundle = collect(make(tmp_path))
    assert [(file.path, file.kind) for file in bundle.manifest.files] == [
        ("data/folder/train.jsonl", "data"), ("folder/helper.py", "code"), ("folder/reward.py", "code"),
    ]  # fmt: skip
    assert {file.sha256 for file in bundle.manifest.files} == set(bundle.sources)
    assert bundle.warnings == ()
    assert collect(make(tmp_path)).manifest.digest == bundle.manifest.digest


def test_names_that_are_elsewhere_do_not_travel(tmp_path: Path) -> None:
    for name in ("hub/name", "s3://bucket/*.jsonl", "/no/such/file.jsonl"):
        spec = make(
            tmp_path,
            data={"train": name},
            rewards=[{"function": "/no/such.py:f"}, {"function": "exact_match"}],
        )
        assert paths(spec) == []


def test_globs_folders_and_included_files(tmp_path: Path) -> None:
    (tmp_path / "more" / "deep").mkdir(parents=True)
    for name in ("more/a.jsonl", "more/b.jsonl", "more/deep/answers.json", "more/deep/.hidden"):
        (tmp_path / name).write_text(name)
    spec = make(
        tmp_path,
        data={"train": "more/*.jsonl", "validation": "more"},
        bundle={"include": ["more/deep", "train.*"]},
    )
    assert paths(spec) == [
        "data/folder/more/a.jsonl", "data/folder/more/b.jsonl", "data/folder/more/deep/answers.json",
        "folder/helper.py", "folder/more/deep/answers.json", "folder/reward.py", "folder/train.jsonl",
    ]  # fmt: skip


def test_data_stay_those_of_an_earlier_bundle(tmp_path: Path) -> None:
    first = collect(make(tmp_path)).manifest
    (tmp_path / "helper.py").write_text("X = 3\n")
    (tmp_path / "train.jsonl").unlink()
    tree = make(tmp_path).model_dump()
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "helper.py").write_text("X = 3\n")
    second = collect(parse_spec(tree), data_of=first)
    assert second.manifest.subset("data") == first.subset("data")
    assert second.manifest.subset("code") != first.subset("code")
    assert len(second.sources) == 2


def test_links_that_leave_the_folder_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "spec"
    folder.mkdir()
    spec = make(folder)
    (tmp_path / "elsewhere.py").write_text("")
    (folder / "helper.py").unlink()
    (folder / "helper.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(SpecError, match=r"rewards\.0\.function: .*helper\.py' is a link .*elsewhere\.py.*copy"):
        collect(spec)
    (folder / "helper.py").unlink()
    (folder / "real.py").write_text("")
    (folder / "helper.py").symlink_to(folder / "real.py")
    assert "folder/helper.py" in paths(spec)


def test_links_to_folders_in_data_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "spec"
    (folder / "saved").mkdir(parents=True)
    (folder / "saved" / "more").symlink_to(tmp_path)
    spec = make(folder, data={"train": "saved"})
    with pytest.raises(SpecError, match=r"data\.train: .*more' is a link"):
        collect(spec)


def test_pipes_and_unreadable_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    os.mkfifo(tmp_path / "train.jsonl")
    with pytest.raises(SpecError, match=r"data\.train: .*is a device, pipe or socket, not a file"):
        collect(spec)
    (tmp_path / "train.jsonl").unlink()
    (tmp_path / "train.jsonl").write_text("{}")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root reads everything
    with pytest.raises(SpecError, match="Permission denied; chmod"):
        collect(spec)


def test_more_than_max_mb_is_refused_with_the_remedy(tmp_path: Path) -> None:
    spec = make(tmp_path, bundle={"max_mb": 1})
    with (tmp_path / "train.jsonl").open("r+b") as data:
        data.truncate(2 << 20)
    with pytest.raises(SpecError, match=r"data\.train: .*2\.0 MB.*bundle\.max_mb 1; give the data as a URL"):
        collect(spec)


@pytest.mark.parametrize("pattern", ["../x", "/etc/passwd", "a/../../x", "", "a\\b"])
def test_included_patterns_that_leave_the_folder_are_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(SpecError, match=r"bundle\.include"):
        make(tmp_path, bundle={"include": [pattern]})


def test_included_patterns_without_files_or_folder(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"bundle\.include\.0: no file matches 'no\*'"):
        collect(make(tmp_path, bundle={"include": ["no*"]}))
    with pytest.raises(SpecError, match="this spec has no folder"):
        collect(make(tmp_path, bundle={"include": ["train.jsonl"]}).model_copy(update={"folder": ""}))


def test_requirements_are_names_of_modules(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"bundle\.requirements.*'numpy>=1' is not a module's name"):
        make(tmp_path, bundle={"requirements": ["numpy>=1"]})


def test_a_file_that_may_be_missing_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "answers.json").write_text("{}")
    source = 'import no_such_module\ndef f(completions, **kw):\n    return open("answers.json")\n'
    warnings = collect(make(tmp_path, source)).warnings
    assert len(warnings) == 2
    assert "reward.py names 'answers.json'" in warnings[0]
    assert "reward.py imports 'no_such_module'" in warnings[1]
    named = make(tmp_path, source, bundle={"include": ["*.json"], "requirements": ["no_such_module"]})
    assert collect(named).warnings == ()
    (warning,) = collect(make(tmp_path, rewards=[{"function": "rewards.py:f"}])).warnings
    assert warning.startswith("rewards.0.function: no file")
    assert "correct the path" in warning
