"""Where the parts of a run are: coordinator and learner must agree on it."""

from __future__ import annotations

from paceline.files.storage import Folder
from paceline.spec import CheckpointingSection

EXPORT = "export"
"""The final export, in the run's directory."""
EXPORTS = "exports"
"""The exports that were asked for by name, in the run's directory."""

EXPORT_MANIFEST = "paceline_manifest.json"
"""In every export: its files with their sizes and SHA-256."""


def checkpoint_folder(settings: CheckpointingSection, run_directory: str, run_id: str) -> Folder:
    """The folder of a run's checkpoints. Their names are unique within a run only, so that each run has one."""
    elsewhere = settings.checkpoint_dir
    return Folder(f"{elsewhere.rstrip('/')}/{run_id}" if elsewhere else f"{run_directory}/checkpoints")
