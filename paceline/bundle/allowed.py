"""Bundles for an operator who allows the code of some folders only: a bundle's code has to be the code that lies there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from paceline.bundle.layout import place_of_folder
from paceline.bundle.manifest import Manifest
from paceline.spec import RunSpec
from paceline.spec.reading import code_paths, file_of


def refusal_of_bundle(spec: RunSpec, manifest: Manifest, allowed: Sequence[Path]) -> str:
    """Return the reason why the code of a bundle may not be used, as a sentence; empty when it may.

    `allowed` are the folders of `--functions-from`; without any, the code of every bundle may be used. With them each file
    of code has to be the same as the submitter's path has on this machine, below one of the folders.
    """
    if not allowed:
        return ""
    folders = [folder.expanduser().resolve() for folder in allowed]
    origins = _origins(spec)
    for file in manifest.subset("code", "include").files:
        base = next((place for place in origins if file.path.startswith(place + "/")), None)
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
            same = hashlib.sha256(original.read_bytes()).hexdigest() == file.sha256
        except OSError:
            same = False
        if not same:
            return f"{original} is not on this machine as the run's bundle has it; --functions-from allows only the file there"
    return ""


def _origins(spec: RunSpec) -> dict[str, Path]:
    """Return the submitter's folders by their places in the bundle."""
    files = [Path(file_of(code)) for code in code_paths(spec).values()]
    origins = {
        place_of_folder(spec.folder, str(file.parent)): file.parent for file in files if file.is_absolute()
    }
    return origins | ({"folder": Path(spec.folder)} if spec.folder else {})
