"""Removes from the environment it runs in what no service opens: tests of packages, headers, static libraries, caches, pip.

Run once at the end of an image's build.
"""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))
FOLDERS = (
    "*/tests",
    "*/**/tests",
    "**/__pycache__",
    "pyarrow/include",
    "pyarrow/src",
    "numpy/_core/include",
    "numpy/f2py",
    "tensorboard_data_server",
    "tensorboard_data_server-*",
    "pip",
    "pip-*",
    "setuptools",
    "setuptools-*",
    "_distutils_hack",
)
KEPT = ("torch",)
"""Packages that read what other packages never do: torch compiles with its own headers."""
FILES = (
    "**/*.a",
    "**/*.pyx",
    "**/*.pxd",
    "pyarrow/libarrow_flight.so*",
    "pyarrow/libarrow_python_flight.so*",
    "pyarrow/_flight*.so",
    "pyarrow/libarrow_substrait.so*",
    "pyarrow/_substrait*.so",
    "tensorboard/webfiles.zip",
    "distutils-precedence.pth",
)


def main() -> None:
    """Remove, and print the bytes that were freed."""
    freed = 0
    for pattern in FOLDERS:
        for path in sorted(SITE.glob(pattern)):
            if path.is_dir() and path.relative_to(SITE).parts[0] not in KEPT:
                freed += sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())
                shutil.rmtree(path)
    for pattern in FILES:
        for path in sorted(SITE.glob(pattern)):
            if path.relative_to(SITE).parts[0] not in KEPT:
                freed += path.lstat().st_size
                path.unlink()
    print(f"{freed / 1e6:.0f} MB removed from {SITE}")


if __name__ == "__main__":
    main()
