"""The place of each file in a bundle, and the spec with the paths of an unpacked bundle.

Files below the spec's folder keep their place below `folder/`, and all others are at `outside/<digest of their folder>/`;
data are below `data/` in the same way.
Places follow from the spec alone, so a stored spec keeps the submitter's paths and no part has to rewrite it.
"""

from __future__ import annotations

import glob
import hashlib
import os.path
from pathlib import Path, PurePosixPath
from typing import Any

from paceline.bundle.manifest import Manifest
from paceline.spec import RunSpec
from paceline.spec.reading import code_paths, file_of, with_code_paths

PREPARED = "data/prepared"
"""Place of the files that `data.preparation` made."""
REPORT = f"{PREPARED}/preparation/0000/report.txt"
"""Place of the sentences on what the preparation left out."""


def place_of_folder(spec_folder: str, folder: str) -> str:
    """Return the place in the bundle of an absolute folder."""
    path = PurePosixPath(os.path.normpath(folder))
    if spec_folder and path.is_relative_to(spec_folder):
        return str(PurePosixPath("folder", path.relative_to(spec_folder)))
    return f"outside/{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"


def place_of_file(spec_folder: str, path: str) -> str:
    """Return the place in the bundle of an absolute file."""
    parent, name = os.path.split(os.path.normpath(path))
    return f"{place_of_folder(spec_folder, parent)}/{name}"


def place_of_data(spec_folder: str, path: str) -> str:
    """Return the place in the bundle of an absolute data file, folder or glob."""
    folder, rest = split_glob(path)
    return f"{place_of_data_folder(spec_folder, folder)}/{rest}"


def place_of_data_folder(spec_folder: str, folder: str) -> str:
    """Return the place in the bundle of a folder with data, apart from code: one file may be both."""
    return f"data/{place_of_folder(spec_folder, folder)}"


def split_glob(path: str) -> tuple[str, str]:
    """Return the folder that holds a path, or everything that a glob can match, and the rest."""
    parts = PurePosixPath(os.path.normpath(path)).parts
    fixed = len(parts) - 1
    for index, part in enumerate(parts):
        if glob.has_magic(part):
            fixed = min(fixed, index)
            break
    return str(PurePosixPath(*parts[:fixed])), "/".join(parts[fixed:])


def place_of_prepared(field: str, index: int, name: str) -> str:
    """Return the place in the bundle of prepared data: of the entry `index` of a field's list, in a file of that name."""
    return f"{PREPARED}/{field.removeprefix('data.')}/{index:04d}/{name}"


def data_names(spec: RunSpec) -> dict[str, tuple[str, ...]]:
    """Return the names of data sets by field."""
    names = {"data.train": spec.data.train, "data.validation": spec.data.validation}
    return {
        field: (value,) if isinstance(value, str) else value
        for field, value in names.items()
        if value is not None
    }


def is_path(name: str) -> bool:
    """Return whether a data set's name is a path, not a URL or a name on the hub: specs that were read hold absolute ones."""
    return os.path.isabs(name) and "://" not in name


def localized(spec: RunSpec, manifest: Manifest, root: Path) -> RunSpec:
    """Return the spec with the paths of the files that `manifest` has and that are unpacked in `root`. Other paths stay, and
    prepared data take the place of the data sets that they were made of."""

    def data(name: str) -> str:
        if not is_path(name):
            return name
        place = place_of_data(spec.folder, name)
        at = place_of_data_folder(spec.folder, split_glob(name)[0]) if glob.has_magic(name) else place
        return str(root / place) if manifest.has(at, "data") else name

    def function(name: str) -> str:
        file, colon, _ = name.rpartition(":")
        if not colon or not os.path.isabs(file):
            return name
        place = place_of_file(spec.folder, file)
        return f"{root / place}:{name.rpartition(':')[2]}" if manifest.has(place, "code") else name

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


def with_original_paths(text: str, spec: RunSpec, root: Path) -> str:
    """Return a message about files in `root` with the paths that the submitter knows."""
    folders = [str(PurePosixPath(file_of(code)).parent) for code in code_paths(spec).values()]
    originals = {place_of_folder(spec.folder, folder): folder for folder in folders} | {PREPARED: "prepared"}
    for name in (name for names in data_names(spec).values() for name in names if is_path(name)):
        folder = split_glob(name)[0]
        originals[place_of_data_folder(spec.folder, folder)] = folder
    if spec.folder:
        originals |= {"folder": spec.folder, "data/folder": spec.folder}
    for place in sorted(originals, key=len, reverse=True):
        text = text.replace(str(root / place), originals[place])
    return text
