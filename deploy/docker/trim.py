"""Removes files that no service opens from its environment: tests of packages, headers, static libraries, caches, pip.

python trim.py [control]

Run it once at the end of an image's build; `control` also removes packages that need torch or serve no store. If
`strip` is installed, it removes debug symbols too.
"""

from __future__ import annotations

import ctypes
import os
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
    "numpy/distutils",
    "numpy/f2py",
    "tensorboard/plugins/projector/tf_projector_plugin",
    "tensorboard_data_server",
    "tensorboard_data_server-*",
    "pip",
    "pip-*",
    "setuptools",
    "setuptools-*",
    "wheel",
    "wheel-*",
    "_distutils_hack",
)
KEPT = ("torch",)
"""Packages that read files which others never do: torch compiles with its headers."""
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
SCRIPTS = ("pip*", "wheel", "f2py", "numpy-config", "[Aa]ctivate*")
"""Commands of removed packages, and commands for shells."""
CONTROL_FILES = (
    "transformers/models/*/feature_extraction_*.py",
    "transformers/models/*/image_processing_*.py",
    "transformers/models/*/modeling_*.py",
    "transformers/models/*/modular_*.py",
    "transformers/models/*/processing_*.py",
    "transformers/models/*/video_processing_*.py",
    "botocore/data/*/**/*.*",
)
"""Models' layers need torch, as do inputs other than text; of a cloud's services only the store and its credentials are
used."""
CONTROL_KEPT = (
    "transformers/models/auto",
    "botocore/data/s3",
    "botocore/data/sts",
    "botocore/data/sso",
    "botocore/data/sso-oidc",
)

PATCHED = b".libs"
"""Marks a library that loads others from its wheel's folder NAME.libs. The wheel's build has changed it; stripped, it
does not load."""


def size(path: Path) -> int:
    """Return the bytes of a file, of a link itself, or of all files in a folder."""
    if path.is_dir() and not path.is_symlink():
        return sum(file.lstat().st_size for file in path.rglob("*") if not file.is_dir())
    return path.lstat().st_size


def remove(path: Path) -> int:
    """Remove a file or a folder; return the bytes that were freed."""
    freed = size(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    return freed


def remove_unused(site: Path, commands: Path, control: bool) -> int:
    """Remove unused files from a folder of packages and from the folder of their commands; return the bytes that were
    freed."""
    freed = 0
    if control:
        kept = [site / name for name in CONTROL_KEPT]
        for path in (path for pattern in CONTROL_FILES for path in sorted(site.glob(pattern))):
            if path.is_file() and not any(path.is_relative_to(folder) for folder in kept):
                freed += remove(path)
    for path in (path for pattern in SCRIPTS for path in sorted(commands.glob(pattern))):
        freed += remove(path)
    for path in (path for pattern in (*FOLDERS, *FILES) for path in sorted(site.glob(pattern))):
        if path.exists() and path.relative_to(site).parts[0] not in KEPT:
            freed += remove(path)
    return freed


def bears_strip(library: Path) -> bool:
    """Return whether a library loads after its symbols were removed."""
    return PATCHED not in library.parent.name.encode() and PATCHED not in library.read_bytes()


def strip(library: Path) -> int:
    """Strip a library's debug symbols, and load it; return the bytes that were freed. Raises OSError if it does not
    load."""
    before = size(library)
    subprocess.run(["strip", "--strip-unneeded", library], check=True)
    ctypes.CDLL(str(library), os.RTLD_NOW)
    return before - size(library)


def main() -> None:
    """Remove, and print the bytes that were freed."""
    freed = remove_unused(SITE, Path(sys.executable).parent, "control" in sys.argv[1:])
    if shutil.which("strip"):
        libraries = (path for path in sorted(SITE.rglob("*.so*")) if path.is_file() and not path.is_symlink())
        for library in libraries:
            if bears_strip(library):
                freed += strip(library)
    print(f"{freed / 1e6:.0f} MB removed from {SITE}")


if __name__ == "__main__":
    main()
