"""The manifest in an export: its files with their hashes, and the run that exported them (`paceline/models/export_origin.py`).

`paceline ledger verify` compares both.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.files.names import EXPORT_MANIFEST
from paceline.files.storage import Folder
from paceline.learner.checkpoints.manifest import hash_files
from paceline.models.export_origin import Origin


def write_export_manifest(folder: Path, origin: Origin | None = None) -> None:
    """List the files that are in the folder, and name the run that they come from, if any."""
    run: dict[str, Any] = {} if origin is None else {"run": origin.model_dump()}
    files = [file.model_dump() for file in hash_files(Folder(folder))]
    (folder / EXPORT_MANIFEST).write_text(json.dumps(run | {"files": files}, indent=1) + "\n")
