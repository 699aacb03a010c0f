"""`Manifest`: the files of a bundle, each with its path, kind, size and SHA-256. The digest of its text names the bundle.

A manifest may come from anyone, so `Manifest.read` refuses every path that could leave the folder which it is unpacked in.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from paceline.errors import InvalidInput

Kind = Literal["code", "data", "include"]
FORMAT = 1
MAX_FILES = 10_000
MAX_PATH = 1024
MAX_BYTES = 8 << 20
"""Largest text of a manifest."""
MAX_SIZE = 1 << 42
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, order=True)
class BundledFile:
    path: str
    """Relative, with `/`, below the folder that the bundle is unpacked in."""
    kind: Kind
    """`code` of reward functions, `data`, or `include` for what the spec lists."""
    size: int
    """Bytes."""
    sha256: str
    """Hexadecimal."""


@dataclass(frozen=True)
class Manifest:
    """The files of a bundle, in the order of their paths."""

    files: tuple[BundledFile, ...]

    @classmethod
    def of(cls, files: Iterable[BundledFile]) -> Manifest:
        """Return the manifest of `files`. Raises InvalidInput as `read` does."""
        manifest = cls(tuple(sorted(files)))
        _check(manifest.files)
        return manifest

    @classmethod
    def read(cls, text: bytes) -> Manifest:
        """Return the manifest in `text`. Raises InvalidInput for anything that `text` would not have been written from."""
        if len(text) > MAX_BYTES:
            raise InvalidInput(f"a bundle's manifest has {len(text)} bytes, not {MAX_BYTES} at most")
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidInput("a bundle's manifest is not JSON; send the bundle again") from None
        if (
            not isinstance(tree, dict)
            or tree.get("format") != FORMAT
            or not isinstance(tree.get("files"), list)
        ):
            raise InvalidInput(
                f"a bundle's manifest is not of format {FORMAT}; use one version of Paceline everywhere"
            )
        manifest = cls(tuple(_file(entry) for entry in tree["files"]))
        _check(manifest.files)
        if manifest.text != text:
            raise InvalidInput("a bundle's manifest is not in its normal form; send the bundle again")
        return manifest

    @cached_property
    def text(self) -> bytes:
        """The normal form: the same files have the same text."""
        files = [[file.path, file.kind, file.size, file.sha256] for file in self.files]
        return json.dumps(
            {"format": FORMAT, "files": files}, separators=(",", ":"), ensure_ascii=True
        ).encode()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `text`, hexadecimal."""
        return hashlib.sha256(self.text).hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def subset(self, *kinds: Kind) -> Manifest:
        """Return the manifest of the files of some kinds."""
        return Manifest(tuple(file for file in self.files if file.kind in kinds))

    def has(self, path: str, kind: Kind) -> bool:
        """Return whether a file of the kind is at `path` or below it."""
        return any(
            file.kind == kind and (file.path == path or file.path.startswith(path + "/"))
            for file in self.files
        )


def is_digest(text: str) -> bool:
    """Return whether `text` is a SHA-256 in hexadecimal, in lower case."""
    return DIGEST.fullmatch(text) is not None


def _file(entry: Any) -> BundledFile:
    match entry:
        case [str(path), str(kind), int(size), str(sha256)] if kind in get_args(Kind) and not isinstance(
            size, bool
        ):
            return BundledFile(path, kind, size, sha256)  # type: ignore[arg-type]
    raise InvalidInput(
        f"a bundle's manifest has the entry {str(entry)[:80]!r}, not path, kind, size and SHA-256"
    )


def _check(files: tuple[BundledFile, ...]) -> None:
    """Raises InvalidInput for files that cannot be unpacked side by side in one folder."""
    if len(files) > MAX_FILES:
        raise InvalidInput(
            f"a bundle has {len(files)} files, not {MAX_FILES} at most; pack them into fewer, or use a URL"
        )
    if tuple(sorted(files)) != files:
        raise InvalidInput("the files of a bundle's manifest are not in order; send the bundle again")
    paths = {file.path for file in files}
    if len(paths) < len(files):
        raise InvalidInput("a bundle's manifest has two files of one path; send the bundle again")
    for file in files:
        parts = file.path.split("/")
        if len(file.path) > MAX_PATH or not file.path.isprintable() or "\\" in file.path:
            raise InvalidInput(
                f"a bundle has the path {file.path[:80]!r}: not {MAX_PATH} printable characters at most; rename the file"
            )
        if any(part in ("", ".", "..") for part in parts):
            raise InvalidInput(
                f"a bundle has the path {file.path!r}, which leaves its folder; name a file below the spec's"
            )
        if not 0 <= file.size <= MAX_SIZE or not is_digest(file.sha256):
            raise InvalidInput(
                f"a bundle has {file.path!r} with size {file.size} and SHA-256 {file.sha256[:80]!r}"
            )
        if any("/".join(parts[:end]) in paths for end in range(1, len(parts))):
            raise InvalidInput(f"a bundle has {file.path!r} below another file; send the bundle again")
