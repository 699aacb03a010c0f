"""Files of an evaluation: a result with digests, and one line for each sample.

Promise: a result names the digest of its samples and of itself, and a file that was changed afterwards is refused.
"""

from __future__ import annotations

import hashlib
import json
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
Number = Annotated[float, Field(allow_inf_nan=False)]


class _Metric(BaseModel):
    value: Number


class _Result(BaseModel):
    """What a result has to have."""

    model_config = ConfigDict(strict=True)
    metrics: dict[str, _Metric]
    digests: dict[str, Any]


class _Sample(BaseModel):
    """What a line of the samples has to have."""

    model_config = ConfigDict(strict=True)
    problem: str
    reward: Number | None
    rewards: dict[str, Number | None]


def digest_of(value: Any) -> str:
    """Return the SHA-256 of a JSON value in its one form: sorted keys, no white space."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def problem_id(prompt: Any) -> str:
    """Return the name by which the same problem is found in another evaluation: a digest of its prompt."""
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
    """Write `result` and `samples` to a folder, and return the result with its digests."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(sample, ensure_ascii=False, allow_nan=False) + "\n" for sample in samples)
    write_whole(folder / SAMPLES, text)
    digests = {**result.get("digests", {}), "samples": hashlib.sha256(text.encode()).hexdigest()}
    whole = {"format": FORMAT, **result, "digests": digests}
    whole["digest"] = digest_of(whole)
    write_whole(folder / RESULT, json.dumps(whole, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    return whole


def read_result(path: Path) -> tuple[Json, list[Json]]:
    """Return the result in a file or in its folder, and its samples. Raises NotFound, DataError for files that are damaged,
    of another format, or changed since they were written."""
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
        raise DataError(f"{file} is no evaluation of format {FORMAT}; evaluate again with this version")
    content = {key: value for key, value in result.items() if key != "digest"}
    if result.get("digest", "") != digest_if_any(content):
        raise DataError(f"{file} was changed after it was written: its digest does not fit; evaluate again")
    samples_file = file.parent / SAMPLES
    try:
        if _Result.model_validate(result).digests.get("samples") != hashlib.sha256(samples_text).hexdigest():
            raise DataError(
                f"{samples_file} was changed after it was written: its digest does not fit; evaluate again"
            )
        samples = [json.loads(line) for line in samples_text.splitlines()]
        for sample in samples:
            _Sample.model_validate(sample)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(map(str, fault["loc"]))
        named = file if error.title == _Result.__name__ else samples_file
        raise DataError(f"{named} is no evaluation: {where}: {fault['msg']}; evaluate again") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{samples_file} is not valid JSON ({error}); evaluate again") from None
    return result, samples


def digest_if_any(value: Any) -> str | None:
    """Return the digest of a value; None for one that has no JSON form."""
    try:
        return digest_of(value)
    except (ValueError, RecursionError):
        return None
