"""Removes from the environment it runs in what no service opens: tests of packages, headers, static libraries, caches, pip.

    python trim.py [control]

Run once at the end of an image's build; with `control` also what needs torch or serves no store. Where `strip` is installed,
symbols that only debuggers read go too.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
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
    "tensorboard/webfiles.zip",
    "distutils-precedence.pth",
)
CONTROL_FILES = (
    "transformers/models/*/modeling_*.py",
    "transformers/models/*/image_processing_*.py",
    "transformers/models/*/modular_*.py",
    "transformers/models/*/video_processing_*.py",
    "botocore/data/*/**/*.gz",
)
"""Models' layers need torch; of a cloud's services the store and its credentials are used."""
CONTROL_KEPT = (
    "transformers/models/auto",
    "botocore/data/s3",
    "botocore/data/sts",
    "botocore/data/sso",
    "botocore/data/sso-oidc",
)

STRIPPED = ("hf_xet", "pyarrow", "tokenizers", "zstandard")
"""Packages whose libraries bear it: those that a wheel's build has patched (numpy's) do not load afterwards."""


def strip(library: Path) -> int:
    """Remove a library's symbols for debuggers; return the bytes that were freed."""
    before = library.stat().st_size
    subprocess.run(["strip", "--strip-unneeded", library], check=False, stderr=subprocess.DEVNULL)
    return before - library.stat().st_size


def main() -> None:
    """Remove, and print the bytes that were freed."""
    freed = 0
    if "control" in sys.argv[1:]:
        kept = [SITE / name for name in CONTROL_KEPT]
        for path in (path for pattern in CONTROL_FILES for path in sorted(SITE.glob(pattern))):
            if not any(path.is_relative_to(folder) for folder in kept):
                freed += path.lstat().st_size
                path.unlink()
    if shutil.which("strip"):
        freed += sum(strip(path) for name in STRIPPED for path in sorted((SITE / name).rglob("*.so*")))
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
