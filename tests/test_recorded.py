"""A run that version 0.1.0 recorded: its ledger, checkpoints and batches are read, continued and trained again.

`tests/data/recorded.tar.xz` has the folder in which `paceline up` ran: the model, the data, and `runs/` with a ledger of six
steps and the checkpoints after four and six. Never make it anew because of a failure here: users have such files.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from paceline.learner.checkpoints.export import checkpoint_weights
from paceline.services.cli.main import main
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec.reading import spec_of_run

ARCHIVE = Path(__file__).parent / "data" / "recorded.tar.xz"
CHAIN = "6a28c117993e6a3663e6087136cd81928382baa3fbdf2b14ecc49c3f102abada"
"""Of the six batches."""
RECORDED_ON = {
    "torch": "2.13.0+cpu",
    "instructions": "AVX512",
    "vendor_id": "GenuineIntel",
    "cpu family": "6",
}
"""Floating-point sums are equal bit by bit only with the same kernels."""
RUN = "runs/recorded-1"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recorded folder as the working directory, to which the paths of its spec are relative."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def ledger(folder: Path) -> Iterator[Ledger]:
    with closing(Ledger(folder / "runs" / "ledger.sqlite", read_only=True)) as opened:
        yield opened


def paceline(*arguments: str) -> tuple[Result, dict[str, Any]]:
    result = CliRunner().invoke(main, [*arguments, "--json"])
    assert result.stdout.startswith("{"), result.output
    return result, json.loads(result.stdout)


def this_machine() -> dict[str, str]:
    """The entries of `RECORDED_ON` here; those of the CPU are missing where /proc/cpuinfo is."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.is_file() else []
    cpu = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    known = {name: cpu[name] for name in ("vendor_id", "cpu family") if name in cpu}
    return {
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
    } | known


def test_all_records_agree() -> None:
    result, report = paceline("ledger", "verify", RUN, "--deep")

    assert report["problems"] == []
    assert result.exit_code == 0
    facts = report["facts"]
    assert (facts["state"], facts["steps"], facts["chain"]) == ("succeeded", 6, CHAIN)
    assert facts["groups"] == {"trained": 24}
    assert facts["tokens"] == {"generated": 472, "trained": 472, "dropped": 0, "live": 0, "wasted": 0}
    assert facts["manifests_on_disk"] == 2


@pytest.mark.merge
@pytest.mark.slow
def test_a_replay_trains_the_recorded_batches_to_the_recorded_weights() -> None:
    result, facts = paceline("replay", RUN, "--from", "4", "--device", "cpu", "--threads", "1")

    assert (facts["from"], facts["to"]) == (4, 6)
    assert facts["compared_with"].endswith("1-6")
    if this_machine() == RECORDED_ON:
        assert result.exit_code == 0, result.output
        assert facts["identical"] is True, facts
        assert facts["equal_losses"] == 2
    else:
        assert facts["largest_difference"] < 1e-3, facts


def test_the_samples_of_a_step_are_shown() -> None:
    shown = CliRunner().invoke(main, ["samples", RUN, "--step", "5", "--json"])

    assert shown.exit_code == 0, shown.output
    assert len(shown.stdout.splitlines()) == 4


def test_every_checkpoint_loads(ledger: Ledger) -> None:
    policy = spec_of_run("recorded-1", ledger.run("recorded-1")["spec_yaml"])[0].policy
    rows = ledger.db.execute("SELECT * FROM checkpoints WHERE removed = 0 ORDER BY step").fetchall()

    loaded = [checkpoint_weights(known.path, known.sha256, policy) for known in map(ledger.checkpoints.from_row, rows)]

    assert [row["step"] for row in rows] == [4, 6]
    earlier, later = loaded
    assert earlier.keys() == later.keys()
    assert all(torch.isfinite(tensor).all() for tensor in later.values())
    assert any(not torch.equal(earlier[name], later[name]) for name in later)


def test_a_new_coordinator_begins_the_next_term(folder: Path) -> None:
    path = folder / "runs" / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as database:
        (term,) = database.execute("SELECT value FROM meta WHERE key = 'term'").fetchone()

    with closing(Ledger(path)) as opened:
        assert opened.term == term + 1
        assert opened.run("recorded-1")["state"] == "succeeded"
        opened.add_run("next-1", "name: next", str(folder / "runs" / "next-1"))
        assert [row["run_id"] for row in opened.runs()] == ["recorded-1", "next-1"]


def test_a_copy_is_judged_by_its_own_files(folder: Path) -> None:
    shutil.copytree(folder / "runs", folder / "copy")
    newest = max((folder / "copy" / "recorded-1" / "checkpoints").iterdir(), key=lambda path: path.name.split("-")[1])
    shutil.rmtree(newest)
    result, report = paceline("ledger", "verify", "recorded-1", "--directory", "copy")
    assert result.exit_code == 1
    assert len(report["problems"]) == 1
    assert "the folder is missing" in report["problems"][0]
    assert paceline("ledger", "verify", "recorded-1", "--directory", "runs")[0].exit_code == 0
