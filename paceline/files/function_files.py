"""Folders from which a run's code may be loaded: a user's file is code that runs in reward or environment workers.

A spec that was read from a file records its folder, and may name functions from there or below. The operator of a
service can allow other folders with `--functions-from`, and then only those, because a spec's record of its folder is
the submitter's statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.spec import RunSpec
from paceline.spec.reading import code_paths, file_of


def refusal(spec: RunSpec, allowed: Sequence[Path] = ()) -> str:
    """Return the reason why a file of code may not be used, as a sentence; empty when it may. Links are followed first.

    `allowed` are the folders of `--functions-from`. Without any, a spec that records no folder, because a program made
    it, may name any file.
    """
    folders = list(allowed) or ([Path(spec.folder)] if spec.folder else [])
    if not folders:
        return ""
    for name, code in code_paths(spec).items():
        file = Path(file_of(code)).expanduser().resolve()
        if not any(file.is_relative_to(folder.expanduser().resolve()) for folder in folders):
            named = " or ".join(str(folder) for folder in folders)
            remedy = "move the file there" if allowed else "move it there"
            return (
                f"{name}: {file} is not below {named}; {remedy}, or allow its folder with "
                f"--functions-from {file.parent}"
            )
    return ""
