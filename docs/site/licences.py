"""Prints the licence of every package in the locks of `make`: `python docs/site/licences.py`; a page of the site too.

A licence is what the package itself states: its expression, else its field, else its classifiers, else the title of its licence file.
"""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy" / "docker" / "locks"
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
HEAD = """\
# Licences of dependencies

What each package of `make`'s locks states about its licence. `run` is what runs, `dev` what only develops, tests and documents;
the images have packages of `run` and of the extras alone.

| package | version | lock | licence |
|---|---|---|---|
"""
NOT_HERE = "not installed where this page was made"
UNSTATED = "not stated"


def page() -> str:
    """Return the page."""
    packages = {name: (version, lock) for lock in ("dev", "run") for name, version in pins(lock)}
    rows = [
        f"| {name} | {version} | {lock} | {licence_here(name, version) or NOT_HERE} |"
        for name, (version, lock) in sorted(packages.items(), key=lambda package: package[0].lower())
    ]
    return HEAD + "\n".join(rows) + "\n"


def pins(lock: str) -> list[tuple[str, str]]:
    """Return the packages of a lock with their versions; torch, which is in none, with those of `run`."""
    found = PIN.findall((LOCKS / f"{lock}.txt").read_text(encoding="utf-8"))
    tested = PIN.findall((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    return found + [pin for pin in tested if pin[0] == "torch" and lock == "run"]


def licence_here(name: str, version: str) -> str:
    """Return what a package states; empty when it is not installed in this version."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return ""
    return licence(found) if found.version.partition("+")[0] == version else ""


def licence(package: Distribution) -> str:
    """Return what a package states about its licence."""
    metadata = package.metadata
    if expression := metadata.get("License-Expression"):
        return str(expression)
    field = str(metadata.get("License") or "").strip()
    if field and "\n" not in field and field != "UNKNOWN":
        return field
    classifiers = [str(each) for each in metadata.get_all("Classifier") or []]
    named = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License ::")]
    return ", ".join(named) or field.partition("\n")[0].strip() or _title(package) or UNSTATED


def _title(package: Distribution) -> str:
    """Return the first line of a package's licence file; empty without one."""
    for file in package.files or ():
        if re.match(r"(licen[cs]e|copying)", file.name, re.IGNORECASE):
            lines = Path(str(file.locate())).read_text(encoding="utf-8", errors="replace").splitlines()
            return next((line.strip() for line in lines if line.strip()), "")
    return ""


if __name__ == "__main__":
    print(page(), end="")
