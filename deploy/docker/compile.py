"""Compiles the modules that the services load, because an image's root is read-only and each process would compile them
at its start.

python compile.py MODULE...

Run it at the end of an image's build, after trim.py. It imports the modules, which proves that nothing they need was
trimmed, and compiles every file that was loaded, of Python's library too, and all files of this repository's packages.
"""

from __future__ import annotations

import importlib
import py_compile
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))


def loaded() -> set[Path]:
    """Return the source files of all modules that are imported now."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return {Path(file) for file in files if file and file.endswith(".py")}


def compile_all(sources: Iterable[Path]) -> int:
    """Compile files without checks of their times; return the bytes. Raises PyCompileError."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    made = (py_compile.compile(str(source), doraise=True, invalidation_mode=mode) for source in sources)
    return sum(Path(path).stat().st_size for path in made if path)


def main() -> None:
    """Import, compile, and print the number of bytes added."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    own = (SITE / "paceline").rglob("*.py")
    sources = {path for path in loaded() if path.is_file() and path != Path(__file__)} | set(own)
    print(f"{compile_all(sorted(sources)) / 1e6:.0f} MB of bytecode of {len(sources)} files")


if __name__ == "__main__":
    main()
