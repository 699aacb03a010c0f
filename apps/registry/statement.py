"""The in-toto statement of a registered model: the digest of every file, and where the model comes from.

The layout is in-toto's Statement v1 (https://github.com/in-toto/attestation/blob/main/spec/v1/statement.md): `subject` has the
files of the folder, `predicate` what Paceline says of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import DataError
from paceline.files.names import STATEMENT

TYPE = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:paceline:registered-model:v1"

Json = dict[str, Any]


@dataclass(frozen=True)
class Lineage:
    """Where a model comes from. Every field is empty or 0 for a model that no run of this coordinator has trained."""

    run_id: str = ""
    session: int = 0
    step: int = 0
    """Steps that were trained."""
    chain: str = ""
    """Chain of the run's batches until then; empty for a run on examples."""
    spec_sha256: str = ""
    """Of the resolved spec's YAML text."""
    data: str = ""
    """Fingerprint of the run's data set."""
    code: str = ""
    """Digest of the bundle with the run's files, or the digests of its reward functions as JSON."""
    batches: tuple[Mapping[str, Any], ...] = ()
    """Step, digest and chain of every batch."""
    named_by_files: bool = False
    """Whether the exported files name the run themselves; else whoever registered them does."""


def files_digest(files: Mapping[str, str]) -> str:
    """Return the SHA-256 over names and SHA-256 of files, in the order of their names; of a folder's files it is that of
    `paceline.models.evaluation_results.folder_digest`."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{files[name]}\n".encode())
    return digest.hexdigest()


def make_statement(
    name: str,
    version: int,
    lineage: Lineage,
    parent: str,
    export: Mapping[str, str],
    files: Mapping[str, str],
) -> Json:
    """Return the statement on a folder. `export` has the SHA-256 of each exported file by its name, `files` those of all files."""
    run = {key: value for key, value in vars(lineage).items() if key != "batches"}
    return {
        "_type": TYPE,
        "subject": [{"name": each, "digest": {"sha256": files[each]}} for each in sorted(files)],
        "predicateType": PREDICATE,
        "predicate": {
            "name": name,
            "version": version,
            "parent": parent,
            "run": run | {"batches": [dict(batch) for batch in lineage.batches]},
            "export": {"sha256": files_digest(export), "files": dict(sorted(export.items()))},
        },
    }


def read_statement(text: bytes, name: str = STATEMENT) -> Json:
    """Return a statement. Raises DataError for a text that is none of this version."""
    try:
        found = json.loads(text)
        sound = found["_type"] == TYPE and found["predicateType"] == PREDICATE
        subjects(found), found["predicate"]["export"]["files"], found["predicate"]["run"]["batches"]
    except (ValueError, LookupError, TypeError):
        sound = False
    if not sound:
        raise DataError(
            f"{name} is no statement on a registered model ({PREDICATE}); register the model again"
        )
    return dict(found)


def subjects(statement: Json) -> dict[str, str]:
    """Return the SHA-256 of each file by its name."""
    return {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
