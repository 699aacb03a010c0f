"""From where a run's reward functions may come: a file of the user's is code that runs in the reward workers.

A spec that was read from a file records its folder, and names functions from there or below. Who runs a service can allow
other folders with `--functions-from`, and then only those: what a spec says about its own folder is the submitter's word.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from paceline.spec import RunSpec


def refusal(spec: RunSpec, allowed: Sequence[Path] = ()) -> str:
    """Why a function's file may not be used, in a sentence; empty when all may. Links are followed first.

    `allowed` are the folders of `--functions-from`. Without any, a spec that records no folder, because it was made by a
    program, may name any file.
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
