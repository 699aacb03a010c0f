"""Each diff of docs/inside/extending.md is applied to a copy of the packages, and the script after it runs there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from python_path import python_path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "inside" / "extending.md"
COPIED = (
    "paceline",
    "protos",
    "rollout",
    "reward",
    "learner",
    "environment",
    "weights",
    "services",
    "apps",
    "pyproject.toml",
)
DEADLINE_S = 300
BLOCK = r"^```{}\n(.*?)^```$"


def sections() -> dict[str, tuple[str, str]]:
    """Diff and script by title."""
    found = {}
    for text in re.split(r"^## ", PAGE.read_text(), flags=re.M)[1:]:
        (diff,), (script,) = (re.findall(BLOCK.format(kind), text, re.M | re.S) for kind in ("diff", "python"))
        found[text.partition("\n")[0]] = diff, script
    return found


def test_the_page_has_six_kinds_of_extension() -> None:
    assert list(sections()) == [
        "An engine",
        "An objective",
        "A reward",
        "A weight channel",
        "A store",
        "A run kind",
    ]


@pytest.mark.parametrize("title", sections())
def test_a_diff_fits_the_tree(title: str) -> None:
    check = ["git", "apply", "--check", "-"]
    done = subprocess.run(check, cwd=ROOT, input=sections()[title][0], text=True, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.merge
@pytest.mark.slow
@pytest.mark.parametrize("title", sections())
def test_a_diff_applies_and_its_script_runs(title: str, tmp_path: Path) -> None:
    diff, script = sections()[title]
    tree, folder = tmp_path / "tree", tmp_path / "work"
    for name in COPIED:
        source, target = ROOT / name, tree / name
        if source.is_dir():
            shutil.copytree(
                source, target, symlinks=True
            )  # with what is compiled, for files that the diff leaves alone
        else:
            shutil.copyfile(source, target)
    folder.mkdir()
    (folder / "script.py").write_text(script)

    # Outside a repository `git apply` changes files below the working directory.
    outside = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
    applied = subprocess.run(
        ["git", "apply", "-"], cwd=tree, env=outside, input=diff, text=True, capture_output=True, timeout=60
    )
    assert applied.returncode == 0, applied.stderr

    # The copy comes before an installed tree on the path, and the script's folder is not on it.
    ran = subprocess.run(
        [sys.executable, "-P", "script.py"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": python_path(tree), "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
        timeout=DEADLINE_S,
    )
    assert ran.returncode == 0, ran.stderr
