"""Makes the lock files of the images, deploy/docker/locks/*.txt: every package with its version and hashes. Needs uv.

    make locks

control    what pyproject.toml asks for, without ONLY_WORKERS and ONLY_TABLES; versions are those of constraints.txt
tables     what ONLY_TABLES adds to control
worker     all of it, for CPUs; torch is in torch-cpu.txt, because its CPU build has another version and index
vllm       worker and vLLM, which chooses the versions of torch, CUDA and transformers by itself
build      what builds this repository's own package
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

DOCKER = Path(__file__).resolve().parent
ROOT = DOCKER.parents[1]
LOCKS = DOCKER / "locks"
ONLY_WORKERS = ("torch", "peft", "math-verify")
"""Requirements of pyproject.toml that neither coordinator nor command line imports before they read weights."""
ONLY_TABLES = ("datasets",)
"""Requirements of pyproject.toml that read Parquet and the hub's data sets, with pyarrow and pandas."""
UNUSED_IN_CONTROL = ("pillow", "tensorboard-data-server")
"""Packages that others ask for, and use for pictures and for TensorBoard's own server alone."""
VLLM = "vllm==0.32.0"
"""The release that `make test-vllm` runs, of the build for GPUs; its own pins go before the ranges of pyproject.toml."""
CUDA = ("nvidia-", "triton", "cuda-", "torch")
"""Beginnings of names that belong to torch's build; its CPU build needs none of them."""
PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
HEAD = "# Made by deploy/docker/lock.py (`make locks`); do not edit.\n"


def name_of(requirement: str) -> str:
    """Return the name of a package in a requirement, in the letters of an index."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _extras(requirement: str) -> str:
    """Return the marker of a requirement with its semicolon; empty without one."""
    _, found, marker = requirement.partition(";")
    return found + marker


def requirements() -> dict[str, list[str]]:
    """Return what each lock begins from."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed, optional = project["project"]["dependencies"], project["project"]["optional-dependencies"]
    workers = [*needed, *optional["s3"], *optional["sandbox"], *optional["environments"]]
    tables = [r for r in [*needed, *optional["s3"]] if name_of(r) not in ONLY_WORKERS]
    return {
        "control": [r for r in tables if name_of(r) not in ONLY_TABLES],
        "tables": tables,
        "worker": workers,
        "vllm": [*(name_of(r) + _extras(r) for r in workers), VLLM],
        "build": [*project["build-system"]["requires"], "wheel"],
    }


def blocks(lock: str) -> list[str]:
    """Return a lock's packages, each with the lines of its hashes."""
    return [block for block in re.split(r"\n(?=[A-Za-z0-9])", lock.strip()) if block]


def make(name: str, wanted: list[str]) -> None:
    """Write one lock file."""
    constraints = [] if name == "vllm" else ["-c", str(ROOT / "constraints.txt")]
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write("\n".join(wanted) + "\n")
        file.flush()
        command = ["uv", "pip", "compile", file.name, *constraints, *PLATFORM]
        options = ["--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
        lock = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
    control = (LOCKS / "control.txt").read_text().removeprefix(HEAD) if name == "tables" else ""
    in_control = {name_of(block) for block in blocks(control)}
    left_out = {"control": UNUSED_IN_CONTROL, "tables": UNUSED_IN_CONTROL, "worker": CUDA}.get(name, ("#",))
    kept = [b for b in blocks(lock) if not name_of(b).startswith(left_out) and name_of(b) not in in_control]
    (LOCKS / f"{name}.txt").write_text(HEAD + "\n".join(kept) + "\n")


def main() -> None:
    """Write all lock files, or those that are named."""
    for name, wanted in requirements().items():
        if not sys.argv[1:] or name in sys.argv[1:]:
            make(name, wanted)


if __name__ == "__main__":
    main()
