"""Decides from which folders workers may load a run's code, because a user's file is code that they execute. A spec
that was read from a file records its folder and may name functions in or below it. With `--functions-from` the
operator of a service allows other folders instead, because the recorded folder is only the submitter's claim. The
code of a bundle must then equal the files there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from paceline.bundle.manifest import Manifest, path_of_folder
from paceline.host.regular_file import check_named, read_named
from paceline.spec import RunSpec
from paceline.spec.reading import code_paths, file_of


def refusal_of_bundle(spec: RunSpec, manifest: Manifest, allowed: Sequence[Path]) -> str:
    """Return why the code of a bundle may not be used, as a sentence; empty if it may. `allowed` are the folders of
    `--functions-from`. If there are none, all bundles may be used; else each file of code must equal the file at the
    submitter's path on this machine, and that path must be below one of the folders."""
    if not allowed:
        return ""
    folders = [folder.expanduser().resolve() for folder in allowed]
    origins = _origins(spec)
    for file in manifest.subset("code", "include").files:
        base = next((bundled for bundled in origins if file.path.startswith(bundled + "/")), None)
        if base is None:
            return f"the bundle has {file.path!r}, which the spec does not name"
        original = (origins[base] / file.path.removeprefix(base + "/")).resolve()
        if not any(original.is_relative_to(folder) for folder in folders):
            named = " or ".join(str(folder) for folder in allowed)
            return (
                f"{original} is not below {named}; move the file there, or allow its folder with --functions-from "
                f"{original.parent}"
            )
        try:
            same = hashlib.sha256(read_named(original)).hexdigest() == file.sha256
        except OSError:
            same = False
        if not same:
            return f"{original} is missing on this machine or differs from the run's copy; --functions-from allows only an identical file"
    return ""


def _origins(spec: RunSpec) -> dict[str, Path]:
    """Return a mapping: the path of a folder in the bundle → the path of this folder on the submitter's machine."""
    files = [Path(file_of(code)) for code in code_paths(spec).values()]
    origins = {path_of_folder(spec.folder, str(file.parent)): file.parent for file in files if file.is_absolute()}
    return origins | ({"folder": Path(spec.folder)} if spec.folder else {})


def refusal_of_files(spec: RunSpec, allowed: Sequence[Path] = ()) -> str:
    """Return why a file of code may not be used, as a sentence; empty if it may. Links are followed first. The file
    must be below one of the folders `allowed`, those of `--functions-from`. If there are none, the file must be below
    the spec's folder; a spec without a folder may name any file that is not withheld."""
    folders = list(allowed) or ([Path(spec.folder)] if spec.folder else [])
    for name, code in code_paths(spec).items():
        file = Path(file_of(code)).expanduser().resolve()
        try:
            check_named(file)
        except OSError as error:
            return f"{name}: {file} cannot be read: {error.strerror}"
        if folders and not any(file.is_relative_to(folder.expanduser().resolve()) for folder in folders):
            named = " or ".join(str(folder) for folder in folders)
            remedy = "move the file there" if allowed else "move it there"
            return (
                f"{name}: {file} is not below {named}; {remedy}, or allow its folder with "
                f"--functions-from {file.parent}"
            )
    return ""
