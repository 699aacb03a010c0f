"""Folders from which a run's reward functions may be loaded: a user's file is code that runs in the reward workers.

A spec that was read from a file records its folder, and may name functions from there or below. The operator of a
service can allow other folders with `--functions-from`, and then only those, because a spec's record of its folder is
the submitter's statement.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.spec import RunSpec


def refusal(spec: RunSpec, allowed: Sequence[Path] = ()) -> str:
    """Return the reason why a function's file may not be used, as a sentence; empty when it may. Links are followed
    first.

    `allowed` are the folders of `--functions-from`. Without any, a spec that records no folder, because a program made
    it, may name any file.
    """
    folders = list(allowed) or ([Path(spec.folder)] if spec.folder else [])
    if not folders:
        return ""
    for index, reward in enumerate(spec.rewards):
        path, colon, _ = reward.function.rpartition(":")
        if not colon:
            continue
        file = Path(path).expanduser().resolve()
        if not any(file.is_relative_to(folder.expanduser().resolve()) for folder in folders):
            named = " or ".join(str(folder) for folder in folders)
            remedy = "move the file there" if allowed else "move it there"
            return (
                f"rewards.{index}.function: {file} is not below {named}; {remedy}, or allow its folder with "
                f"--functions-from {file.parent}"
            )
    return ""
