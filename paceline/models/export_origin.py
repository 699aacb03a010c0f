"""Reads from the manifest of model files which run exported the files. Promise: the manifest is one of the exported
files, so the statement and signature of a registered folder cover it. Converted or foreign folders have no origin."""

from __future__ import annotations

from collections.abc import Collection

from pydantic import BaseModel, ConfigDict, ValidationError

from paceline.errors import Conflict, DataError
from paceline.files.names import EXPORT_MANIFEST
from paceline.files.storage import Folder


class Origin(BaseModel):
    """The run that exported the weights; `run` in the manifest."""

    model_config = ConfigDict(frozen=True, strict=True)
    run_id: str
    session: int
    """Session of the learner that trained the last step."""
    step: int
    chain: str
    """Hash chain over the run's batches up to that step; empty for a run on examples."""
    spec_sha256: str
    """SHA-256 of the resolved spec's YAML text."""


class _Manifest(BaseModel):
    run: Origin | None = None


def origin_of(export: Folder) -> Origin | None:
    """Return the origin that an exported folder names; None without a name. Raises DataError for a damaged manifest."""
    if not export.exists(EXPORT_MANIFEST):
        return None
    try:
        manifest = _Manifest.model_validate_json(export.read(EXPORT_MANIFEST))
    except ValidationError as error:
        raise DataError(
            f"{export}: {EXPORT_MANIFEST} does not say which run exported the files ({error.errors()[0]['msg']}); export them again"
        ) from None
    return manifest.run


def check_origin(origin: Origin, run_id: str, step: int, chain: str, specs: Collection[str]) -> None:
    """Raise Conflict unless the files are of this run after `step` steps, with `chain` and a spec among `specs`."""
    expected = {"run_id": run_id, "step": step, "chain": chain}
    for field, value in expected.items():
        if (named := getattr(origin, field)) != value:
            raise Conflict(
                f"the exported files say {field} {named!r} ({EXPORT_MANIFEST}), but the records of run {run_id} say "
                f"{value!r}; name the run and step that exported them, or export the model again"
            )
    if origin.spec_sha256 not in specs:
        raise Conflict(
            f"the exported files name a spec with the SHA-256 {origin.spec_sha256} ({EXPORT_MANIFEST}), but the spec "
            f"of run {run_id} has another; export the model again"
        )
