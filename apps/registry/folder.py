"""Makes and verifies the folder of a registered model.

    config.json, *.safetensors, …   the exported model, unchanged
    README.md                       card
    paceline_spec.yaml              resolved spec of its run
    evaluations/<n>/                result.json and samples.jsonl of `paceline eval`
    verdicts/<n>.json               of `paceline gate`
    paceline.json                   statement
    model.sig                       signature

Promise: `verify_folder` refuses a folder in which any file was changed, added or removed since it was made, and names
the file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.apps.registry.statement import (
    Lineage,
    files_digest,
    make_statement,
    read_statement,
    sign,
    subjects,
    verify,
)
from paceline.errors import Conflict, DataError, NotFound, counted
from paceline.files.names import CARD, EVALUATIONS, SIGNATURE, SPEC, STATEMENT, VERDICTS
from paceline.files.storage import CHUNK_BYTES, Folder
from paceline.files.whole_file import write_whole
from paceline.host.regular_file import open_named, read_regular
from paceline.models.evaluation_results import RESULT, SAMPLES, check_evidence, outcome_of, read_result

CONFIGS = ("config.json", "adapter_config.json")
"""Files that describe a model folder; each folder has one of them."""

Json = dict[str, Any]


@dataclass(frozen=True)
class Contents:
    statement: Json
    statement_sha256: str
    evaluations: tuple[Json, ...]
    verdicts: tuple[Json, ...]

    @property
    def export_sha256(self) -> str:
        return str(self.statement["predicate"]["export"]["sha256"])


@dataclass(frozen=True)
class Sources:
    export: Folder
    evaluations: Sequence[Path] = ()
    """Folders, or result files in them, that `paceline eval` has written."""
    verdicts: Sequence[Path] = ()
    """Files that `paceline gate` has written."""
    spec_yaml: str = ""
    """Resolved spec of the run; empty without a run."""
    base_model: str = ""
    """Model that training began from, for the card."""


def make_folder(
    into: Path, sources: Sources, name: str, version: int, lineage: Lineage, parent: str, key: Path
) -> Contents:
    """Fill the empty folder `into` and sign it. Raises NotFound, DataError if evaluations or verdicts belong to other
    files, Conflict if the export is itself a registered folder."""
    export = _copy_export(sources.export, into)
    earlier = (into / CARD).read_text(errors="replace") if CARD in export else ""
    for number, path in enumerate(sources.evaluations):
        _copy_evaluation(path, into / EVALUATIONS / str(number))
    for number, path in enumerate(sources.verdicts):
        (into / VERDICTS).mkdir(exist_ok=True)
        write_whole(into / VERDICTS / f"{number}.json", json.dumps(_read_json(path), indent=2) + "\n")
    evaluations, verdicts = _read_evidence(into, files_digest(export))
    if sources.spec_yaml:
        write_whole(into / SPEC, sources.spec_yaml)
    text = card_text(name, version, lineage, sources.base_model, evaluations, verdicts, earlier)
    write_whole(into / CARD, text)
    files = dict(_digests(into))
    content = json.dumps(make_statement(name, version, lineage, parent, export, files), indent=1) + "\n"
    write_whole(into / STATEMENT, content)
    sign(into, key)
    return Contents(json.loads(content), _sha256(into / STATEMENT), tuple(evaluations), tuple(verdicts))


def verify_folder(folder: Path, public_key: Path | None = None) -> Contents:
    """Return the contents of a registered folder. Raises DataError, which names the file, if a file differs from the
    statement, if evaluations or verdicts belong to other files, or if a key is given and the signature is invalid.
    Raises InvalidInput if the package for signatures is missing or the key is invalid, and NotFound if there is no key
    file."""
    if not (folder / STATEMENT).is_file():
        raise DataError(f"{folder.name} has no {STATEMENT}, so it is not a registered model")
    statement = read_statement((folder / STATEMENT).read_bytes())
    stated, found = subjects(statement), dict(_digests(folder))
    for name in sorted(stated.keys() | found.keys()):
        if name not in found:
            raise DataError(f"{name} is missing, but {STATEMENT} names it. Fetch the model again")
        if found[name] != stated.get(name):
            why = "was changed" if name in stated else "was added"
            raise DataError(f"{name} {why} after the model was registered; fetch the model again")
    predicate = statement["predicate"]
    export = predicate["export"]["files"]
    changed = [name for name in export if name != CARD and export[name] != stated.get(name)]
    if changed or files_digest(export) != predicate["export"]["sha256"]:
        raise DataError(f"{STATEMENT} contradicts itself about the exported files {changed}; register the model again")
    if (folder / SPEC).is_file() and found[SPEC] != predicate["run"]["spec_sha256"]:
        raise DataError(f"{SPEC} is not the spec that {STATEMENT} names; register the model again")
    evaluations, verdicts = _read_evidence(folder, predicate["export"]["sha256"])
    if public_key is not None:
        verify(folder, public_key)
    return Contents(statement, _sha256(folder / STATEMENT), tuple(evaluations), tuple(verdicts))


def copy_folder(source: Folder, into: Path) -> None:
    """Copy all files of a folder or URL into a local folder. Raises NotFound if there are no files, DataError if one is
    unreadable."""
    names = source.files() if source.exists() else {}
    if not names:
        raise NotFound(f"{source} has no files: the model's folder was removed, or this machine cannot reach it")
    for name in names:
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = source.open(name) if source.local is None else open_named(source.local / name)
        except OSError as error:
            raise DataError(f"{source}: {name} cannot be read: {error.strerror or error}") from None
        with file, target.open("wb") as copy:
            shutil.copyfileobj(file, copy, CHUNK_BYTES)


def _copy_export(source: Folder, into: Path) -> dict[str, str]:
    copy_folder(source, into)
    export = dict(_digests(into))
    if not any(name in export for name in CONFIGS):
        raise NotFound(
            f"{source} has no {CONFIGS[0]}; name a Hugging Face model folder, as `paceline export` writes it"
        )
    if (into / STATEMENT).exists() or (into / SIGNATURE).exists():
        raise Conflict(f"{source} is a registered folder; register the export that it was made of")
    return export


def _copy_evaluation(path: Path, into: Path) -> None:
    read_result(path)  # raises for one that was changed
    into.mkdir(parents=True)
    file = path / RESULT if path.is_dir() else path
    shutil.copyfile(file, into / RESULT)
    shutil.copyfile(file.parent / SAMPLES, into / SAMPLES)


def _read_evidence(folder: Path, export_sha256: str) -> tuple[list[Json], list[Json]]:
    """Return the results and verdicts in a registered folder. Raises DataError, which names the file."""
    results = sorted((folder / EVALUATIONS).glob(f"*/{RESULT}"), key=lambda path: int(path.parent.name))
    judged = sorted((folder / VERDICTS).glob("*.json"), key=lambda path: int(path.stem))
    evaluations = {path.relative_to(folder).as_posix(): read_result(path)[0] for path in results}
    verdicts = {path.relative_to(folder).as_posix(): _read_json(path) for path in judged}
    check_evidence(export_sha256, evaluations, verdicts)
    return list(evaluations.values()), list(verdicts.values())


def _read_json(path: Path) -> Json:
    try:
        found = json.loads(read_regular(path))
    except OSError as error:
        raise NotFound(f"no verdict at {path}: {error.strerror}; `paceline gate --output` writes one") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not valid JSON ({error}); write it again with `paceline gate --output`") from None
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a verdict; write it again with `paceline gate --output`")
    return found


def _digests(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield name and SHA-256 of each file except statement and signature."""
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        name = path.relative_to(folder).as_posix()
        if name not in (STATEMENT, SIGNATURE):
            yield name, _sha256(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def card_text(
    name: str,
    version: int,
    lineage: Lineage,
    base_model: str,
    evaluations: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
    earlier: str = "",
) -> str:
    """Return the card's text; it ends with `earlier`, the text of the export's card."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=each.get("name", "evaluation"),
            dataset_name=each.get("name", "evaluation"),
            metric_type=metric,
            metric_value=found["value"],
            metric_name=metric,
        )
        for each in evaluations
        for metric, found in each["metrics"].items()
    ]
    data = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["paceline", "reinforcement-learning"],
        eval_results=results or None,
        base_model=base_model or None,
    )
    lines = [*_body(name, version, lineage, evaluations, verdicts), *_earlier(earlier)]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines)


def _body(
    name: str,
    version: int,
    lineage: Lineage,
    evaluations: Sequence[Mapping[str, Any]],
    verdicts: Sequence[Mapping[str, Any]],
) -> list[str]:
    lines = [f"# {name}, version {version}", ""]
    if lineage.run_id:
        lines += [
            f"Trained by Paceline in the run `{lineage.run_id}`, session {lineage.session}, {counted(lineage.step, 'step')}.",
            "",
            f"- chain of its batches: `{lineage.chain or 'none (a run on examples)'}`",
            f"- SHA-256 of its spec: `{lineage.spec_sha256}`",
            f"- fingerprint of its data: `{lineage.data or 'not recorded'}`",
            *([] if lineage.named_by_files else ["- the run was named at registration, because the files name none"]),
            "",
        ]
    for each in evaluations:
        lines += [f"## Evaluation {each.get('name', '')}", "", "| metric | value | 95 % interval |", "|---|---|---|"]
        lines += [
            f"| {metric} | {found['value']:.4f} | {found['low']:.4f} to {found['high']:.4f} |"
            for metric, found in each["metrics"].items()
        ]
        lines += [
            "",
            f"{counted(each['problems'], 'problem')}, {counted(each['k'], 'completion')} each, digest `{each['digest']}`.",
            "",
        ]
    lines += [f"Gate: {outcome_of(list(verdicts))}.", *(f"- {r}" for v in verdicts for r in v.get("reasons", ())), ""]
    return [*lines, f"`{STATEMENT}` names every file's SHA-256 and every batch of the run.", ""]


def _earlier(text: str) -> list[str]:
    from huggingface_hub import ModelCard

    if not text.strip():
        return []
    return ["## Card of the exported folder", "", ModelCard(text, ignore_metadata_errors=True).text.strip(), ""]
