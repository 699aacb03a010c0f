"""Imports of a file: the modules beside it, transitively, and the names of all others."""

from __future__ import annotations

from pathlib import Path

from paceline.bundle.imports import imports_of, literal_files


def write(folder: Path, **sources: str) -> None:
    for name, text in sources.items():
        path = folder / name.replace("__", "/").replace("/init/", "/__init__")
        path = path.with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in imports_of(folder / "reward.py").files)


def test_modules_beside_a_file_are_found_transitively(tmp_path: Path) -> None:
    write(
        tmp_path,
        reward="import json, helper\n",
        helper="def f():\n    from deeper import g\n",
        deeper="",
        unused="",
    )
    assert names(tmp_path) == ["deeper.py", "helper.py", "reward.py"]


def test_packages_are_taken_whole_with_the_imports_of_their_modules(tmp_path: Path) -> None:
    write(
        tmp_path,
        reward="from checks.numbers import close\n",
        checks____init__="",
        checks__numbers="from . import other\nimport beside\nimport numpy\n",
        checks__other="",
        checks__plain="",
        beside="",
    )
    (tmp_path / "checks" / "__init__.py").write_text("")
    found = names(tmp_path)
    assert {"checks/numbers.py", "checks/other.py", "checks/plain.py", "beside.py"} <= set(found)
    assert set(imports_of(tmp_path / "reward.py").others) == {"numpy"}


def test_modules_by_literal_name_and_cycles(tmp_path: Path) -> None:
    write(
        tmp_path,
        reward='import importlib\nimportlib.import_module("a")\n',
        a="import b, sklearn.svm\n",
        b="import a\n",
    )
    assert names(tmp_path) == ["a.py", "b.py", "reward.py"]
    assert imports_of(tmp_path / "reward.py").others == {"sklearn": tmp_path / "a.py"}


def test_a_file_that_cannot_be_parsed_has_no_imports(tmp_path: Path) -> None:
    write(tmp_path, reward="import (", helper="")
    assert names(tmp_path) == ["reward.py"]


def test_literal_files_are_those_beside_the_source(tmp_path: Path) -> None:
    write(tmp_path, reward='open("answers.json"); open("/etc/passwd"); open("../x"); open("missing.json")\n')
    (tmp_path / "answers.json").write_text("{}")
    assert literal_files(tmp_path / "reward.py") == {"answers.json"}
