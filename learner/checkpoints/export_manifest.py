"""The list of an export's files with their hashes, in the export itself: `paceline ledger verify` compares both."""

from __future__ import annotations

import json
from pathlib import Path

from learner.checkpoints.manifest import hash_files
from paceline.files.names import EXPORT_MANIFEST
from paceline.files.storage import Folder


def write_export_manifest(folder: Path) -> None:
    """List the files that are in the folder."""
    files = [file.model_dump() for file in hash_files(Folder(folder))]
    (folder / EXPORT_MANIFEST).write_text(json.dumps({"files": files}, indent=1) + "\n")
