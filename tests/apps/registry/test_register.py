"""`paceline models register`: lineage of the run's records, evidence of the same files, a folder that verifies."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from registry_place import Workplace
from trained_ledger import RUN_ID

from paceline.apps.registry.folder import verify_folder
from paceline.errors import Conflict, PacelineError, Unavailable
from paceline.files.names import EXPORT_MANIFEST
from paceline.models.registered import Models
from paceline.services.cli.recorded.source import opened_ledger


def test_a_version_names_every_batch_of_its_run_and_the_ledger_agrees(place: Workplace) -> None:
    found = place.passed()
    assert (found["name"], found["version"], found["stage"]) == ("sums", 1, "passed")
    with opened_ledger(place.runs / "ledger.sqlite") as ledger:
        batch = ledger.batches.get(RUN_ID, 0)
    assert batch is not None
    assert (found["run_id"], found["step"], found["chain"]) == (RUN_ID, 1, batch["chain"])
    contents = verify_folder(Path(found["path"]), place.public)
    lineage = contents.statement["predicate"]["run"]
    assert lineage["batches"] == [{"step": 0, "digest": batch["digest"], "chain": batch["chain"]}]
    verified = place.done("ledger", "verify", RUN_ID)
    assert verified["problems"] == []
    assert verified["facts"]["registered_models"] == ["sums:1"]


def test_versions_follow_each_other(place: Workplace) -> None:
    assert place.registered()["version"] == 1
    second = place.registered("--parent", "sums:1")
    assert (second["version"], second["stage"], second["parent"]) == (2, "registered", "sums:1")
    listed = place.done("models", "list")["models"]
    assert [(each["name"], each["version"]) for each in listed] == [("sums", 2), ("sums", 1)]


def test_evidence_of_other_files_is_refused_and_leaves_nothing(place: Workplace) -> None:
    first = place.evaluated("first", [1.0] * 30)
    (place.folder / "model" / "config.json").write_text(
        json.dumps(json.loads((place.folder / "model" / "config.json").read_text()) | {"note": 1})
    )
    refused = place.run(
        "models",
        "register",
        "sums",
        place.folder / "model",
        "--signing-key",
        place.key,
        "--evaluation",
        first,
    )
    assert refused.exit_code == 1
    assert "evaluations/0/result.json measured model files with the digest" in refused.output
    assert list((place.runs / "models" / "sums").iterdir()) == []
    assert place.done("models", "list") == {"models": []}


def test_a_verdict_on_another_evaluation_is_refused(place: Workplace) -> None:
    first, other = place.evaluated("first", [1.0] * 30), place.evaluated("other", [0.5] * 30)
    verdict = place.judged("verdict.json", other, first)
    refused = place.run(
        *("models", "register", "sums", place.folder / "model", "--signing-key", place.key),
        *("--evaluation", first, "--verdict", verdict),
    )
    assert refused.exit_code == 1
    assert "verdicts/0.json judges an evaluation that this model does not have" in refused.output


def name_run(place: Workplace, **changes: object) -> None:
    """Make the files of the model name the run, as an export does."""
    with opened_ledger(place.runs / "ledger.sqlite") as ledger:
        batch, text = ledger.batches.get(RUN_ID, 0), ledger.run(RUN_ID)["spec_yaml"]
    assert batch is not None
    run = {
        "run_id": RUN_ID,
        "session": 1,
        "step": 1,
        "chain": batch["chain"],
        "spec_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    (place.folder / "model" / EXPORT_MANIFEST).write_text(json.dumps({"run": run | changes, "files": []}))


def test_files_that_name_their_run_are_compared_with_its_records(place: Workplace) -> None:
    name_run(place)
    register = ("models", "register", "sums", place.folder / "model", "--signing-key", place.key)
    known = place.run(*register, "--run", RUN_ID)
    assert (known.exit_code, known.stderr) == (0, "")
    found = place.done("models", "show", "sums:1")
    assert (found["run_id"], found["session"], found["step"]) == (RUN_ID, 1, 1)
    statement = verify_folder(Path(found["path"]), place.public).statement
    assert statement["predicate"]["run"]["named_by_files"] is True
    assert f"say that run {RUN_ID} exported them after 1 step, but" in place.run(*register).stderr
    name_run(place, chain="0" * 64)
    refused = place.run(*register, "--run", RUN_ID)
    assert refused.exit_code == 1
    assert "the exported files say chain '0000" in refused.output
    assert len(place.done("models", "list")["models"]) == 2


def test_files_that_name_no_run_are_told_of(place: Workplace) -> None:
    register = ("models", "register", "sums", place.folder / "model", "--signing-key", place.key)
    done = place.run(*register, "--run", RUN_ID)
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: these files name no run: they were converted after their export")
    assert place.run(*register).stderr == ""


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--run", RUN_ID, "--step", "2"), "--step is 2, but run sums-1 has trained 1"),
        (("--run", "nosuch"), "no run 'nosuch'"),
        (("--step", "1"), "--step belongs to a run"),
        (("--parent", "sums:7"), "no registered model sums:7"),
        (("--parent", "sums"), "name a version"),
    ],
)
def test_what_the_records_do_not_have_is_refused(place: Workplace, more: tuple[str, ...], message: str) -> None:
    refused = place.run("models", "register", "sums", place.folder / "model", "--signing-key", place.key, *more)
    assert refused.exit_code in (1, 2)
    assert message in refused.output
    assert place.done("models", "list") == {"models": []}


def test_a_file_that_is_no_key_is_refused(place: Workplace) -> None:
    for key, message in (
        (place.public, "is not a private elliptic key"),
        (Path("nosuch"), "no file nosuch"),
    ):
        refused = place.run("models", "register", "sums", place.folder / "model", "--signing-key", key)
        assert refused.exit_code == 1
        assert message in refused.output


@pytest.mark.parametrize(
    ("error", "stays"), [(Unavailable("the answer was lost"), True), (Conflict("the next version is 2"), False)]
)
def test_the_files_stay_where_the_version_may_be_on_record(
    place: Workplace, monkeypatch: pytest.MonkeyPatch, error: PacelineError, stays: bool
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Models, "register", fail)
    refused = place.run("models", "register", "sums", place.folder / "model", "--signing-key", place.key)
    assert refused.exit_code == 1
    assert [path.name[:2] for path in (place.runs / "models" / "sums").iterdir()] == (["1-"] if stays else [])
