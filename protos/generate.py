"""Generates the Python stubs beside the .proto files: `python protos/generate.py` (`--check`: only compare, and check that
pyproject.toml asks for packages that the stubs can be imported with).

The wire's package, paceline.v1, is also the stubs' package: `paceline/v1` is a link to the folder of the .proto files.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent
PACKAGE = "paceline/v1"
"""Folder of the .proto files."""
GENERATED_BY = {
    "grpcio": r"GRPC_GENERATED_VERSION = '([0-9.]+)'",
    "protobuf": r"# Protobuf Python Version: ([0-9.]+)",
}
"""The version that made a stub, by the package whose older versions refuse to import it."""


def generate(into: Path) -> None:
    """Writes the stubs of every .proto under `into`. Raises SystemExit when protoc fails."""
    from grpc_tools import protoc

    well_known = Path(protoc.__file__).parent / "_proto"
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / PACKAGE).glob("*.proto"))
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # protoc's plugins
    outputs = [f"--{kind}_out={into}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{well_known}", *outputs, *protos]) != 0:
        raise SystemExit("protoc failed")


def low_floors(requirements: Iterable[str], stubs: Iterable[str]) -> Mapping[str, str]:
    """Return the least version that the stubs can be imported with, of each package of which `requirements` admits others."""
    text = "\n".join(stubs)
    asked = {name: version for each in requirements for name, _, version in [each.partition(">=")] if version}
    needed = {name: max(re.findall(made, text), key=_numbers) for name, made in GENERATED_BY.items()}
    return {name: version for name, version in needed.items() if _numbers(asked.get(name, "0")) < _numbers(version)}


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".")]


def main() -> None:
    """Regenerates the stubs, or with --check exits with 1 when they or the packages' least versions are not current."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = {f"{PACKAGE}/{path.name}": path.read_text() for path in (Path(folder) / PACKAGE).iterdir()}
    if "--check" in sys.argv[1:]:
        stale = [n for n, text in fresh.items() if not (ROOT / n).exists() or (ROOT / n).read_text() != text]
        if stale:
            raise SystemExit(f"stubs are not current: {', '.join(sorted(stale))}; run `make protos`")
        project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
        if low := low_floors(project["dependencies"], fresh.values()):
            asked = ", ".join(f"{name}>={version}" for name, version in low.items())
            raise SystemExit(f"pyproject.toml must ask for {asked}, because the stubs refuse older versions")
        return
    for name, text in fresh.items():
        (ROOT / name).write_text(text)


if __name__ == "__main__":
    main()
