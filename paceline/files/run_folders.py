"""Folder of a run's checkpoints, on which coordinator and learner must agree."""

from __future__ import annotations

from paceline.files.storage import Folder
from paceline.spec import CheckpointingSection


def checkpoint_folder(settings: CheckpointingSection, run_directory: str, run_id: str) -> Folder:
    """Return the folder of a run's checkpoints. Their names are unique within a run only, so that each run has one."""
    elsewhere = settings.checkpoint_dir
    return Folder(f"{elsewhere.rstrip('/')}/{run_id}" if elsewhere else f"{run_directory}/checkpoints")
