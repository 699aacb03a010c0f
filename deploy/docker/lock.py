"""Makes the lock files of the images and of `make`, deploy/docker/locks/*.txt: every package with its version and
hashes. Needs uv.

    make locks

control    requirements of pyproject.toml, without ONLY_WORKERS and ONLY_TABLES, and the extra `encryption`; versions are those of
           constraints.txt
tables     what ONLY_TABLES adds to control
worker     all of it, for CPUs; torch is in torch-cpu.txt, because its CPU build has another version and index
vllm       worker and vLLM, which chooses the versions of torch, CUDA and transformers by itself
build      what builds this repository's own package
run        what `make demo` installs, on every platform, without torch: an index chooses its build, by constraints.txt
dev        what `make test` adds to run
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

DOCKER = Path(__file__).resolve().parent
ROOT = DOCKER.parents[1]
LOCKS = DOCKER / "locks"
ONLY_WORKERS = ("torch", "peft", "mpmath")
"""Requirements of pyproject.toml that coordinator and command line import only to read weights."""
ONLY_TABLES = ("datasets",)
"""Requirements of pyproject.toml that read Parquet and the hub's data sets, with pyarrow and pandas."""
UNUSED_IN_CONTROL = ("pillow", "tensorboard-data-server")
"""Packages that others require only for pictures and for TensorBoard's server."""
VLLM = "vllm==0.32.0"
"""The release that `make test-vllm` runs, in the build for GPUs; its pins override the ranges of pyproject.toml."""
CUDA = ("nvidia-", "triton", "cuda-", "torch")
"""Name prefixes of packages of torch's GPU build; the CPU build needs none of them."""
PLATFORM = ("--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28")
LEFT_OUT = {
    "control": UNUSED_IN_CONTROL,
    "tables": UNUSED_IN_CONTROL,
    "worker": CUDA,
    "run": (*CUDA, "httpx2-jsfetch"),  # the latter is for browsers
    "dev": (*CUDA, "httpx2-jsfetch"),
}
"""Name prefixes of packages to leave out of a lock."""
ADDS_TO = {"tables": "control", "dev": "run"}
"""Locks from which another lock's packages are removed."""
OF_MAKE = ("run", "dev")
EVERY_PLATFORM = ("--universal", "--python-version", "3.11.5")
HEAD = "# Made by deploy/docker/lock.py (`make locks`); do not edit.\n"


def name_of(requirement: str) -> str:
    """Return the normalized name of a package in a requirement."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def _extras(requirement: str) -> str:
    _, found, marker = requirement.partition(";")
    return found + marker


def requirements() -> dict[str, list[str]]:
    """Return the input requirements of each lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed, optional = project["project"]["dependencies"], project["project"]["optional-dependencies"]
    workers = [*needed, *optional["s3"], *optional["environments"]]
    tables = [r for r in [*needed, *optional["s3"], *optional["encryption"]] if name_of(r) not in ONLY_WORKERS]
    return {
        "control": [r for r in tables if name_of(r) not in ONLY_TABLES],
        "tables": tables,
        "worker": workers,
        "vllm": [*(name_of(r) + _extras(r) for r in workers), VLLM],
        "build": [*project["build-system"]["requires"], "wheel"],
        "run": needed,
        "dev": [*needed, *_of_extra("dev", optional)],
    }


def _of_extra(name: str, optional: dict[str, list[str]]) -> list[str]:
    """Return the requirements of an extra, including those of the extras that it names in brackets."""
    found = []
    for requirement in optional[name]:
        own = re.fullmatch(r"paceline\[(.*)\]", requirement)
        found += [r for extra in own[1].split(",") for r in _of_extra(extra, optional)] if own else [requirement]
    return found


def blocks(lock: str) -> list[str]:
    """Return a lock's packages, each with the lines of its hashes."""
    return [block for block in re.split(r"\n(?=[A-Za-z0-9])", lock.strip()) if block]


def make(name: str, wanted: list[str]) -> None:
    """Write one lock file."""
    constraints = [] if name == "vllm" else ["-c", str(ROOT / "constraints.txt")]
    with tempfile.NamedTemporaryFile("w", suffix=".in") as file:
        file.write("\n".join(wanted) + "\n")
        file.flush()
        platform = EVERY_PLATFORM if name in OF_MAKE else PLATFORM
        command = ["uv", "pip", "compile", file.name, *constraints, *platform]
        options = ["--generate-hashes", "--no-header", "--no-annotate", "--quiet"]
        lock = subprocess.run([*command, *options], check=True, capture_output=True, text=True).stdout
    other = (LOCKS / f"{ADDS_TO[name]}.txt").read_text().removeprefix(HEAD) if name in ADDS_TO else ""
    in_other = {_pin(block) for block in blocks(other)}
    kept = [b for b in blocks(lock) if not _is_left_out(name, name_of(b)) and _pin(b) not in in_other]
    (LOCKS / f"{name}.txt").write_text(HEAD + "\n".join(kept) + "\n")


def _pin(block: str) -> str:
    """Return version and marker of a package: a package needed on some platforms there may be needed on all here."""
    return block.partition("\\")[0].strip()


def _is_left_out(lock: str, package: str) -> bool:
    return package.startswith(LEFT_OUT.get(lock, ("#",)))


def main() -> None:
    """Write all lock files, or those that are named."""
    wanted, names = requirements(), sys.argv[1:]
    if unknown := set(names) - set(wanted):
        raise SystemExit(f"there is no lock {', '.join(sorted(unknown))}; there are {', '.join(wanted)}")
    if shutil.which("uv") is None:
        raise SystemExit("uv is not on the path; install it (pip install uv) and run again")
    for name, needed in wanted.items():  # what adds to another lock comes after it
        if not names or name in names:
            make(name, needed)


if __name__ == "__main__":
    main()
