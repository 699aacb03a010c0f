"""`Manifest`: the path, kind, size and SHA-256 of each file in a bundle. The digest of its text names the bundle. A
manifest is untrusted, so `Manifest.read` refuses every path that could leave the folder in which it is unpacked.
Files below the spec's folder keep their path below `folder/`; files in other folders are at
`outside/<digest of their folder>/`. Data files have such a path below `data/`. Paths follow from the spec alone, so a
stored spec keeps the submitter's paths."""

from __future__ import annotations

import glob
import hashlib
import json
import os.path
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

from paceline.errors import InvalidInput
from paceline.host.regular_file import without_quotations
from paceline.spec import RunSpec
from paceline.spec.reading import code_paths, file_of, spec_to_yaml, with_code_paths

Kind = Literal["code", "data", "include"]
FORMAT = 1
MAX_FILES = 10_000
MAX_PATH = 1024
MAX_BYTES = 8 << 20
MAX_SIZE = 1 << 42
DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, order=True)
class BundledFile:
    path: str
    """Path with `/`, relative to the folder in which the bundle is unpacked."""
    kind: Kind
    """`code` of reward functions, `data`, or `include` for a file of bundle.include."""
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    files: tuple[BundledFile, ...]

    @classmethod
    def of(cls, files: Iterable[BundledFile]) -> Manifest:
        """Return the manifest of `files`. Raises InvalidInput as `read` does."""
        manifest = cls(tuple(sorted(files)))
        _check(manifest.files)
        return manifest

    @classmethod
    def read(cls, text: bytes) -> Manifest:
        """Return the manifest in `text`. Raises InvalidInput unless `text` is a manifest in canonical form."""
        if len(text) > MAX_BYTES:
            raise InvalidInput(f"a bundle's manifest has {len(text)} bytes, more than {MAX_BYTES}")
        try:
            tree = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidInput("a bundle's manifest is not JSON; send the bundle again") from None
        if not isinstance(tree, dict) or tree.get("format") != FORMAT or not isinstance(tree.get("files"), list):
            raise InvalidInput(f"a bundle's manifest is not of format {FORMAT}; use one version of Paceline everywhere")
        manifest = cls(tuple(_file(entry) for entry in tree["files"]))
        _check(manifest.files)
        if manifest.text != text:
            raise InvalidInput("a bundle's manifest is not in canonical form; send the bundle again")
        return manifest

    @cached_property
    def text(self) -> bytes:
        """The manifest as text in canonical form: the same files give the same text."""
        files = [[file.path, file.kind, file.size, file.sha256] for file in self.files]
        return json.dumps({"format": FORMAT, "files": files}, separators=(",", ":"), ensure_ascii=True).encode()

    @cached_property
    def digest(self) -> str:
        """Name of the bundle: the SHA-256 of `text` in hexadecimal."""
        return hashlib.sha256(self.text).hexdigest()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def subset(self, *kinds: Kind) -> Manifest:
        return Manifest(tuple(file for file in self.files if file.kind in kinds))

    def has(self, path: str, kind: Kind) -> bool:
        return any(file.kind == kind and (file.path == path or file.path.startswith(path + "/")) for file in self.files)


def is_digest(text: str) -> bool:
    """Return whether `text` is a SHA-256 in hexadecimal, in lower case."""
    return DIGEST.fullmatch(text) is not None


def _file(entry: Any) -> BundledFile:
    match entry:
        case [str(path), str(kind), int(size), str(sha256)] if kind in get_args(Kind) and not isinstance(size, bool):
            return BundledFile(path, kind, size, sha256)  # type: ignore[arg-type]
    raise InvalidInput(f"a bundle's manifest has the entry {str(entry)[:80]!r}, not path, kind, size and SHA-256")


def _check(files: tuple[BundledFile, ...]) -> None:
    """Raise InvalidInput for files that cannot be unpacked side by side in one folder."""
    if len(files) > MAX_FILES:
        raise InvalidInput(
            f"a bundle has {len(files)} files, more than {MAX_FILES}; pack them into fewer, or use a URL"
        )
    if tuple(sorted(files)) != files:
        raise InvalidInput("the files of a bundle's manifest are not in order; send the bundle again")
    paths = {file.path for file in files}
    if len(paths) < len(files):
        raise InvalidInput("a bundle's manifest has the same path twice; send the bundle again")
    for file in files:
        parts = file.path.split("/")
        if len(file.path) > MAX_PATH or not file.path.isprintable() or "\\" in file.path:
            raise InvalidInput(
                f"a bundle has the path {file.path[:80]!r}, not 1 to {MAX_PATH} printable characters; rename the file"
            )
        if any(part in ("", ".", "..") for part in parts):
            raise InvalidInput(
                f"a bundle has the path {file.path!r}, which leaves its folder; name a file below the spec's folder"
            )
        if not 0 <= file.size <= MAX_SIZE or not is_digest(file.sha256):
            raise InvalidInput(
                f"a bundle has {file.path!r} with the invalid size {file.size} or SHA-256 {file.sha256[:80]!r}; send "
                "the bundle again"
            )
        if any("/".join(parts[:end]) in paths for end in range(1, len(parts))):
            raise InvalidInput(f"a bundle has {file.path!r} below another file; send the bundle again")


PREPARED = "data/prepared"
"""Path of the files that `data.preparation` made."""
REPORT = f"{PREPARED}/preparation/0000/report.txt"
"""Path of the sentences about rows that the preparation left out."""


def path_of_folder(spec_folder: str, folder: str) -> str:
    """Return the path in the bundle of an absolute folder."""
    path = PurePosixPath(os.path.normpath(folder))
    if spec_folder and path.is_relative_to(spec_folder):
        return str(PurePosixPath("folder", path.relative_to(spec_folder)))
    return f"outside/{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def path_of_file(spec_folder: str, path: str) -> str:
    parent, name = os.path.split(os.path.normpath(path))
    return f"{path_of_folder(spec_folder, parent)}/{name}"


def path_of_data(spec_folder: str, path: str) -> str:
    """Return the path in the bundle of an absolute data file, folder or glob."""
    folder, rest = split_glob(path)
    return f"{path_of_data_folder(spec_folder, folder)}/{rest}"


def path_of_data_folder(spec_folder: str, folder: str) -> str:
    """Return the path in the bundle of a folder with data. Code has another path, because a file may be both."""
    return f"data/{path_of_folder(spec_folder, folder)}"


def split_glob(path: str) -> tuple[str, str]:
    """Split a path into its folder and the rest; split a glob into the folder that has all its matches and the rest."""
    parts = PurePosixPath(os.path.normpath(path)).parts
    fixed = len(parts) - 1
    for index, part in enumerate(parts):
        if glob.has_magic(part):
            fixed = min(fixed, index)
            break
    return str(PurePosixPath(*parts[:fixed])), "/".join(parts[fixed:])


def path_of_prepared(field: str, index: int, name: str) -> str:
    """Return the bundle path of a file with prepared data; `index` is the data set's position in the field's list."""
    return f"{PREPARED}/{field.removeprefix('data.')}/{index:04d}/{name}"


def data_names(spec: RunSpec) -> dict[str, tuple[str, ...]]:
    """Return, for each field of the spec with data sets, the names of these data sets."""
    names = {"data.train": spec.data.train, "data.validation": spec.data.validation}
    return {field: (value,) if isinstance(value, str) else value for field, value in names.items() if value is not None}


def is_path(name: str) -> bool:
    """Return whether a data set's name is a path (absolute in specs that were read), not a URL or a name on the hub."""
    return os.path.isabs(name) and "://" not in name


def localized(spec: RunSpec, manifest: Manifest, root: Path) -> RunSpec:
    """Return the spec with paths into `root` for the files that `manifest` has. Other paths stay, and prepared data
    replace the data sets from which they were made."""

    def data(name: str) -> str:
        if not is_path(name):
            return name
        bundled = path_of_data(spec.folder, name)
        at = path_of_data_folder(spec.folder, split_glob(name)[0]) if glob.has_magic(name) else bundled
        return str(root / bundled) if manifest.has(at, "data") else name

    def function(name: str) -> str:
        file, colon, _ = name.rpartition(":")
        if not colon or not os.path.isabs(file):
            return name
        bundled = path_of_file(spec.folder, file)
        return f"{root / bundled}:{name.rpartition(':')[2]}" if manifest.has(bundled, "code") else name

    def several(value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        return tuple(map(data, value)) if isinstance(value, tuple) else value and data(value)

    found = {"train": several(spec.data.train), "validation": several(spec.data.validation)}
    section = spec.data.model_copy(update=found)
    if manifest.has(PREPARED, "data"):
        train, validation = (
            [str(root / file.path) for file in manifest.files if file.path.startswith(f"{PREPARED}/{part}/")]
            for part in ("train", "validation")
        )
        section = section.with_prepared(train, validation)
    update: dict[str, Any] = {"data": section}
    moved = with_code_paths(spec, function)
    if moved != spec:
        update["folder"] = str(root)
    return moved.model_copy(update=update)


def for_submitter(text: str, spec: RunSpec, local: RunSpec, root: Path | None, *, is_of_data: bool = True) -> str:
    """Return the message `text` about the files of `local`, with the submitter's paths. `local` is `spec` with paths
    into the bundle in `root`. Quotations from files that came in no bundle (files of this machine or of its stores) are
    left out. If the message is not about data (`is_of_data` is false), its quotations stay unless it names such a
    file."""
    names = [name for names in data_names(local).values() for name in names]
    names = [name for name in names if "://" in name or glob.has_magic(name) or os.path.exists(name)]  # not of the hub
    names += map(file_of, code_paths(local).values())
    others = [name for name in names if root is None or not Path(name).is_relative_to(root)]
    named = [split_glob(name)[0] for name in others]
    named += [os.path.realpath(os.path.expanduser(name)) for name in named if "://" not in name]  # as they are opened
    is_bundled = root is not None and str(root) in text
    if any(name in text for name in named) or (is_of_data and others and not is_bundled):
        known, paths = spec_to_yaml(spec), "\n".join(names)
        folders = tuple(split_glob(name)[0] for names in data_names(spec).values() for name in names)
        text = without_quotations(
            text, lambda said: said in (paths if said.isdecimal() else known) or said.startswith(folders)
        )
    return text if root is None else with_original_paths(text, spec, root)


def with_original_paths(text: str, spec: RunSpec, root: Path) -> str:
    folders = [str(PurePosixPath(file_of(code)).parent) for code in code_paths(spec).values()]
    originals = {path_of_folder(spec.folder, folder): folder for folder in folders} | {PREPARED: "prepared"}
    for name in (name for names in data_names(spec).values() for name in names if is_path(name)):
        folder = split_glob(name)[0]
        originals[path_of_data_folder(spec.folder, folder)] = folder
    if spec.folder:
        originals |= {"folder": spec.folder, "data/folder": spec.folder}
    for bundled in sorted(originals, key=len, reverse=True):
        text = text.replace(str(root / bundled), originals[bundled])
    return text
