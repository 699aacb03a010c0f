"""docs/use/tutorial.md, done as it says: its files are written, its commands run in their order, and what it promises is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "use" / "tutorial.md"
STEPS = 40
"""Of each run, instead of 100: the last evaluation is better than the first by then."""
LIMIT_S = 600


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)


def run(folder: Path, *words: str) -> str:
    bin_folder = str(Path(sys.executable).parent)
    environment = os.environ | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    environment.pop("PACELINE_TOKEN_FILE", None)
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_tutorial_can_be_followed(tmp_path: Path) -> None:
    for block in [*blocks("python"), *blocks("yaml")]:
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    run(tmp_path, "paceline", "demo", "grpo.max_num_steps=4")  # its second stage is not needed afterwards
    run(tmp_path, "python", "make_data.py")
    said: dict[str, str] = {}
    commands = [shlex.split(line) for block in blocks("bash") for line in block.splitlines()]
    for words in commands:
        if words[0] != "paceline":
            continue  # `make demo` and the shell's `.`
        short = [f"grpo.max_num_steps={STEPS}"] if words[1] == "up" else []
        said[shlex.join(words)] = run(tmp_path, *words, *short)
    assert len(said) == 7
    evaluations = [re.findall(r"exact (\d\.\d+) ±", text) for name, text in said.items() if " up " in f"{name} "]
    assert len(evaluations) == 2
    assert all(float(found[-1]) > float(found[0]) + 0.1 for found in evaluations)
    assert "all records agree" in said["paceline ledger verify exact-4"]
    assert "<svg" in (tmp_path / "exact.html").read_text()
    assert "<svg" in (tmp_path / "runs" / "partial-3" / "report.html").read_text()
