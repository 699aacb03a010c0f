"""Reads and writes the two files of an evaluation (the result with its digests, and the samples, one a line), and
checks that results and verdicts belong to a model. Promise: a result holds the digests of its samples and of itself,
and a document that was changed later is refused by name. An evaluation counts only for the model files that it
measured, a verdict only with its evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.errors import DataError, NotFound
from paceline.files.whole_file import write_whole
from paceline.host.regular_file import read_regular

FORMAT = 1
RESULT = "result.json"
SAMPLES = "samples.jsonl"

Json = dict[str, Any]
Document = Mapping[str, Any]
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Metric(BaseModel):
    value: Number


class _Result(BaseModel):
    model_config = ConfigDict(strict=True)
    metrics: dict[str, _Metric]
    digests: dict[str, Any]


class _Sample(BaseModel):
    model_config = ConfigDict(strict=True)
    problem: str
    reward: Number | None
    rewards: dict[str, Number | None]


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value in canonical form: sorted keys, no white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def problem_id(prompt: Any) -> str:
    """Return the id of a problem across evaluations: a digest of the problem's prompt."""
    return digest_of(prompt)[:16]


def folder_digest(folder: Path) -> str:
    """Return the SHA-256 over names and contents of the files in a folder, in the order of their names."""
    digest = hashlib.sha256()
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def write_result(folder: Path, result: Json, samples: list[Json]) -> Json:
    """Write `result` and `samples` to a folder; return the result with its digests."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(sample, ensure_ascii=False, allow_nan=False) + "\n" for sample in samples)
    write_whole(folder / SAMPLES, text)
    digests = {**result.get("digests", {}), "samples": hashlib.sha256(text.encode()).hexdigest()}
    whole = {"format": FORMAT, **result, "digests": digests}
    whole["digest"] = digest_of(whole)
    write_whole(folder / RESULT, json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return whole


def read_result(path: Path) -> tuple[Json, list[Json]]:
    """Return the result in a file or its folder, and its samples. Raises NotFound; DataError for files that are
    damaged, of another format, or changed since they were written."""
    file = path / RESULT if path.is_dir() else path
    try:
        result = json.loads(read_regular(file))
        samples_text = read_regular(file.parent / SAMPLES)
    except OSError as error:
        raise NotFound(
            f"no evaluation at {path}: {error.strerror} ({error.filename}); `paceline eval` writes one"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not valid JSON ({error}); evaluate again") from None
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise DataError(f"{file} is not an evaluation of format {FORMAT}; evaluate again with this version")
    if not _has_own_digest(result):
        raise DataError(f"{file} was changed after it was written: its digest does not match; evaluate again")
    samples_file = file.parent / SAMPLES
    try:
        if _Result.model_validate(result).digests.get("samples") != hashlib.sha256(samples_text).hexdigest():
            raise DataError(
                f"{samples_file} was changed after it was written: its digest does not match; evaluate again"
            )
        samples = [json.loads(line) for line in samples_text.splitlines()]
        for sample in samples:
            _Sample.model_validate(sample)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        named = file if error.title == _Result.__name__ else samples_file
        raise DataError(f"{named} is not an evaluation: {where}: {fault['msg']}; evaluate again") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{samples_file} is not valid JSON ({error}); evaluate again") from None
    return result, samples


def _has_own_digest(document: Document) -> bool:
    """Return whether a document matches its digest; false if the document has no JSON form."""
    try:
        digest = digest_of({key: value for key, value in document.items() if key != "digest"})
        return bool(document.get("digest", "") == digest)
    except (ValueError, RecursionError):
        return False


def check_evidence(export_sha256: str, evaluations: Mapping[str, Document], verdicts: Mapping[str, Document]) -> None:
    """Check the results and verdicts of a model, both keyed by file name. Raises DataError, which names the file."""
    for name, result in evaluations.items():
        _check_digest(name, result, "an evaluation")
        if result.get("format") != FORMAT:
            raise DataError(f"{name} is not an evaluation of format {FORMAT}; evaluate again with this version")
        measured = result.get("digests", {}).get("model", "")
        if measured != export_sha256:
            raise DataError(
                f"{name} measured model files with {'the digest ' + measured if measured else 'no recorded digest'}, but "
                f"the model's files have {export_sha256}; evaluate the model's folder"
            )
    digests = {result["digest"] for result in evaluations.values()}
    for name, verdict in verdicts.items():
        _check_digest(name, verdict, "a verdict")
        if verdict.get("outcome") not in ("passed", "failed", "undecided"):
            raise DataError(f"{name} has the outcome {verdict.get('outcome')!r}; write it again with `paceline gate`")
        if verdict.get("digests", {}).get("candidate") not in digests:
            raise DataError(f"{name} judges an evaluation that this model does not have; add that evaluation")


def has_passed(verdicts: Sequence[Document]) -> bool:
    """Return whether at least one gate has judged the model, and every gate that judged passed the model."""
    return bool(verdicts) and all(verdict["outcome"] == "passed" for verdict in verdicts)


def outcome_of(verdicts: Sequence[Document]) -> str:
    """Return the gates' outcome for people: `no verdict`, `passed`, or the first other outcome."""
    return next((v["outcome"] for v in verdicts if v["outcome"] != "passed"), "passed" if verdicts else "no verdict")


def _check_digest(name: str, document: Document, what: str) -> None:
    if not _has_own_digest(document):
        raise DataError(
            f"{name} is {what} that was changed after it was written: its digest does not match; create it again"
        )
