"""The page of licences has that of every package of make's locks, and these have every package of constraints.txt."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def licences() -> Any:
    spec = importlib.util.spec_from_file_location("licences", ROOT / "docs/site/licences.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_locks_of_make_have_the_versions_of_the_constraints(licences: Any) -> None:
    locked = {normal(name): version for lock in ("run", "dev") for name, version in licences.pins(lock)}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = dict(line.strip().split("==") for line in lines if "==" in line and not line.startswith("#"))
    del constraints["torchao"]  # of an extra that `make` does not install
    assert {normal(name): version for name, version in constraints.items()}.items() <= locked.items()
    only_elsewhere = locked.keys() - {normal(name) for name in constraints}
    assert only_elsewhere == {"setuptools", "pywin32", "tzdata"}


def test_the_page_has_the_licence_of_every_package_that_is_here(licences: Any) -> None:
    page = licences.page()
    for name, version in (*licences.pins("run"), *licences.pins("dev")):
        assert re.search(rf"^\| {re.escape(name)} \| {re.escape(version)} \| (run|dev) \| .+ \|$", page, flags=re.M), (
            name
        )
    assert f"| {licences.UNSTATED} |" not in page


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ("License-Expression: MIT\nLicense: other\n", "MIT"),
        ("License: BSD\nClassifier: License :: OSI Approved :: MIT License\n", "BSD"),
        ("License: UNKNOWN\nClassifier: License :: OSI Approved :: MIT License\n", "MIT License"),
        ("", "not stated"),
    ],
)
def test_a_package_says_its_licence_in_one_of_several_ways(
    licences: Any, tmp_path: Path, metadata: str, said: str
) -> None:
    folder = tmp_path / "x-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: x\nVersion: 1\n{metadata}")
    assert licences.licence(licences.Distribution.at(folder)) == said
