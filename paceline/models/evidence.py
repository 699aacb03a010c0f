"""Evaluations and verdicts of a model: do they belong together, and did the model pass? Pure.

Promise: an evaluation counts for the model files that it measured alone, a verdict for an evaluation that is there, and a document
that was changed after it was written is refused with its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import DataError
from paceline.models.evaluation_results import FORMAT, digest_if_any

Json = Mapping[str, Any]


def check_evidence(export_sha256: str, evaluations: Mapping[str, Json], verdicts: Mapping[str, Json]) -> None:
    """Check the results and verdicts of a model, both by the names of their files. Raises DataError, which names the file."""
    for name, result in evaluations.items():
        _check_digest(name, result, "an evaluation")
        if result.get("format") != FORMAT:
            raise DataError(f"{name} is no evaluation of format {FORMAT}; evaluate again with this version")
        measured = result.get("digests", {}).get("model", "")
        if measured != export_sha256:
            raise DataError(
                f"{name} measured model files of the digest {measured or 'that is not on record'}, and these have "
                f"{export_sha256}; evaluate this folder"
            )
    digests = {result["digest"] for result in evaluations.values()}
    for name, verdict in verdicts.items():
        _check_digest(name, verdict, "a verdict")
        if verdict.get("outcome") not in ("passed", "failed", "undecided"):
            raise DataError(
                f"{name} has the outcome {verdict.get('outcome')!r}; write it again with `paceline gate`"
            )
        if verdict.get("digests", {}).get("candidate") not in digests:
            raise DataError(
                f"{name} judges an evaluation that is not among those of this model; give that evaluation too"
            )


def has_passed(verdicts: Sequence[Json]) -> bool:
    """Return whether a gate has judged the model, and every one has passed it."""
    return bool(verdicts) and all(verdict["outcome"] == "passed" for verdict in verdicts)


def outcome_of(verdicts: Sequence[Json]) -> str:
    """Return what the gates say, for people: `no verdict`, `passed`, or the first outcome that is not."""
    return next(
        (v["outcome"] for v in verdicts if v["outcome"] != "passed"), "passed" if verdicts else "no verdict"
    )


def _check_digest(name: str, document: Json, what: str) -> None:
    content = {key: value for key, value in document.items() if key != "digest"}
    if document.get("digest", "") != digest_if_any(content):
        raise DataError(f"{name} is not {what} as it was written: its digest does not fit; make it anew")
