"""Every benchmark runs: with `--short` it takes its smallest sizes, and prints a result or why there is none here."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
MODULES = ("exchange_load", "random_model", "short_form")
"""Files that others import."""
COMMANDS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in MODULES)
TIMEOUT_S = 300.0


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_short_form_of_a_benchmark_prints_its_result(name: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with tempfile.TemporaryDirectory(prefix="b") as folder:  # short, because names of sockets are limited
        ended = subprocess.run(
            [sys.executable, str(BENCHMARKS / f"{name}.py"), "--short"],
            cwd=ROOT,
            env=environment | {"TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert "Traceback" not in ended.stderr
    assert ended.stdout.strip() or ended.stderr.strip()  # some print their rows on stderr, and JSON alone on stdout


def test_every_benchmark_has_a_short_form_and_a_line_in_the_readme() -> None:
    readme = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        source = (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")
        assert re.search(r"short_form import|--short", source), name
        assert ast.get_docstring(ast.parse(source)), name
        assert f"benchmarks/{name}.py" in readme or f"`make {name}`" in readme or f"NAME={name}`" in readme, name
    assert all((BENCHMARKS / f"{name}.py").is_file() for name in re.findall(r"(?<!tests/)benchmarks/(\w+)\.py", readme))
