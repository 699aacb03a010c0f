"""Collects the root of an image without a system around it: Python, an environment, the libraries that both load,
certificates.

python collect.py FOLDER

Run it with the interpreter of the environment (/opt/paceline). The result has no shell, package manager or compiler;
the user paceline (10001) owns the writable folders. `var/lib/dpkg/status.d`, which scanners and SBOM tools read, lists
the Debian packages of the files, and `usr/share/doc` has their licences.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

ENVIRONMENT = Path(sys.prefix)
STDLIB = Path(sysconfig.get_path("stdlib"))
UNUSED = shutil.ignore_patterns(
    "test",
    "tests",
    "idlelib",
    "ensurepip",
    "lib2to3",
    "tkinter",
    "turtledemo",
    "config-*",
    "*.a",
    "site-packages",
    "_dbm.*",
)
"""Folders and files of Python's library that no service imports; `_dbm` would need a database's library."""
ZONES = Path("/usr/share/zoneinfo")
UNCHECKED = 1
"""Flags in the bytecode that compile.py makes (PEP 552)."""
FILES = (
    "/etc/ssl",
    "/etc/nsswitch.conf",
    "/etc/os-release",
    "/usr/lib/os-release",
    "/etc/mime.types",
)
LOADED_BY_NAME = ("libgcc_s.so.1", "libnss_files.so.2", "libnss_dns.so.2")
"""Libraries that glibc loads by name, so that no file lists them."""
OWNED = ("runs", "store", "token", "cache", "bundles", "home/paceline")
USER = 10001


def unused_of_library(folder: str, names: list[str]) -> set[str]:
    """Return the names to leave out of a folder of Python's library, including bytecode that no service loads."""
    found = set(UNUSED(folder, names))
    if Path(folder).name == "__pycache__":
        for name in names:
            with (Path(folder) / name).open("rb") as file:
                if int.from_bytes(file.read(8)[4:], "little") != UNCHECKED:
                    found.add(name)
    return found


def add(root: Path, path: Path) -> None:
    """Copy a file or folder to the same path below `root`, with the targets of its links."""
    goal = root / path.parent.resolve().joinpath(path.name).relative_to("/")
    if goal.exists() or not path.exists():
        return
    goal.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        goal.symlink_to(os.readlink(path))
        add(root, path.parent / os.readlink(path))
    elif path.is_dir():
        shutil.copytree(path, goal, symlinks=True, ignore=IGNORED.get(path))
    else:
        shutil.copy2(path, goal)


IGNORED = {STDLIB: unused_of_library, ZONES: shutil.ignore_patterns("right", "posix")}
"""Names left out of folders, such as the copies of all time zones."""


def libraries(files: list[Path]) -> set[Path]:
    """Return the libraries outside the environment that `files` load, the dynamic loader among them."""
    listed = subprocess.run(["ldd", *files], check=False, capture_output=True, text=True).stdout
    found = {Path(path) for path in re.findall(r"(/\S+) \(0x", listed)}
    loader = next(path for path in found if path.name.startswith("ld-linux"))
    system = next(path.parent for path in found if path.name == "libc.so.6")
    found |= {path for name in LOADED_BY_NAME if (path := system / name).exists()}
    return {path for path in found if not path.is_relative_to(ENVIRONMENT)} | {loader}


def packages(paths: list[Path]) -> Iterator[str]:
    """Yield the Debian packages that own the files."""
    names = sorted({str(path) for path in paths} | {str(path).removeprefix("/usr") for path in paths})
    owners = subprocess.run(["dpkg", "-S", *names], check=False, capture_output=True, text=True).stdout
    yield from sorted({line.split(":")[0] for line in owners.splitlines() if not line.startswith("diversion")})


def main() -> None:
    """Write the root."""
    root = Path(sys.argv[1])
    for folder in ("usr/bin", "usr/lib", "usr/lib64", *OWNED, "tmp", "etc"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64"):  # as in Debian
        (root / name).symlink_to(f"usr/{name}")
    python = Path(sys.executable).resolve()
    library = (path for path in STDLIB.rglob("*.so") if not UNUSED(str(path.parent), [path.name]))
    binaries = [python, *library, *ENVIRONMENT.rglob("*.so*")]
    loaded = libraries([path for path in binaries if path.is_file()])
    for path in [Path(name) for name in FILES] + [ZONES, python, STDLIB, ENVIRONMENT, *loaded]:
        add(root, path)
    for parent in Path(sys.executable).parents[:1]:  # the environment's links to the interpreter
        for link in parent.glob("python*"):
            if link.is_symlink() and (target := Path(os.readlink(link))).is_absolute():
                add(root, target)
    loader = next(path for path in loaded if path.name.startswith("ld-linux"))
    goal = root / loader.relative_to("/")
    if not goal.exists():
        goal.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(loader.resolve(), goal)
    status = root / "var/lib/dpkg/status.d"
    status.mkdir(parents=True)
    for package in packages([python, STDLIB / "os.py", *loaded, *(path.resolve() for path in loaded)]):
        about = subprocess.run(["dpkg", "-s", package], check=True, capture_output=True, text=True).stdout
        (status / package).write_text(about)
        add(root, Path("/usr/share/doc") / package / "copyright")
    (root / "etc/passwd").write_text(
        f"root:x:0:0::/root:/sbin/nologin\npaceline:x:{USER}:{USER}::/home/paceline:/sbin/nologin\n"
    )
    (root / "etc/group").write_text(f"root:x:0:\npaceline:x:{USER}:\n")
    for folder in OWNED:
        os.chown(root / folder, USER, USER)
    (root / "tmp").chmod(0o1777)
    files = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"{sum(path.stat().st_size for path in files) / 1e6:.0f} MB in {root}")


if __name__ == "__main__":
    main()
