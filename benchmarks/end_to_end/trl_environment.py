"""TRL in a separate environment, made once: its versions must not meet Paceline's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-trl"
REQUIREMENTS = ("trl==1.16.*", "torch==2.13.*")
"""TRL's side is measured with the same torch as Paceline's."""

SIDE_TIMEOUT_S = 900.0


def is_made() -> bool:
    """Return whether the environment is there."""
    return (ENVIRONMENT / "installed").exists()


def python() -> Path:
    """The environment's Python; makes the environment if it is not there. Raises CalledProcessError."""
    executable = ENVIRONMENT / "bin" / "python"
    if not is_made():
        print(f"making {ENVIRONMENT} with {', '.join(REQUIREMENTS)} …", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)], check=True)
        pip = [str(executable), "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt")]
        subprocess.run([*pip, *REQUIREMENTS], check=True, stdout=sys.stderr)
        (ENVIRONMENT / "installed").write_text("\n".join(REQUIREMENTS) + "\n")
    return executable


def run_side(script: Path, *arguments: Any) -> str:
    """The last line that a script prints in the environment. Raises SystemExit with its output's end if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [str(python()), str(script), *map(str, arguments)],
        env=environment | {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
        capture_output=True,
        text=True,
        timeout=SIDE_TIMEOUT_S,
    )
    if done.returncode != 0:
        raise SystemExit(f"{script.name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout.strip().splitlines()[-1]
