"""A report is one file with all that it promises, in which hostile text is only text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import paceline
from report_content import charts_of, content_of
from trained_ledger import RUN_ID, Writer

from paceline.v1 import worker_pb2

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202egnp" + "x" * 30_000


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    """The ledger of a run of one trained step, with metrics of three, and a warning."""
    writer = Writer(tmp_path, str(tmp_path / "model"), {"prompt": HOSTILE, "answer": "2"})
    writer.train_a_step()
    with writer.ledger.transaction():
        for step in range(3):
            content = {
                "step": step,
                "time": 1.0,
                "reward": step / 4,
                "loss": step,
                "age/0": step,
                "lr": 1e-5,
                "kl": 0.0,
            }
            writer.ledger.add_event(RUN_ID, "step", content)
        writer.ledger.add_event(RUN_ID, "warning", {"message": HOSTILE[:100]})
    return writer


@pytest.fixture
def runs(writer: Writer, tmp_path: Path) -> Path:
    writer.ledger.close()
    return tmp_path / "runs"


@pytest.fixture
def report(runs: Path, tmp_path: Path) -> Path:
    result = paceline("report", RUN_ID, "-o", tmp_path / "out.html", "--verify", "--directory", runs)
    assert result.exit_code == 0, result.output
    return tmp_path / "out.html"


def test_a_report_has_every_section(report: Path) -> None:
    text = report.read_text()
    blocks = content_of(text)["blocks"]
    assert [block[2] for block in blocks if block[:2] == ["heading", 2]] == [
        "Rewards of the batch", "Completions of the batch", "Loss and policy", "Metrics that never moved",
        "Best and worst completions of the last step", "Warnings",
        "Spec: differences from the defaults", "Spec",
    ]  # fmt: skip
    assert [chart["title"] for chart in charts_of(text)] == ["reward [reward]", "age/0 [groups]", "loss"]
    (still,) = [block[3] for block in blocks if block[:2] == ["table", "Constant metrics"]]
    assert sorted(row[1] for row in still) == ["0", "1e-05"]
    assert ["list", [HOSTILE[:100]]] in blocks
    assert ["text", "All records agree (paceline ledger verify).", "good"] in blocks
    assert blocks[-1][:2] == ["folded", "as YAML"]
    for part in ("5 tokens generated = 5 trained", "grpo.max_num_steps", "reward 1.25", "more characters"):
        assert part in json.dumps(blocks, ensure_ascii=False), part


def test_checkpoints_and_what_is_wrong_with_them_are_listed(writer: Writer, tmp_path: Path) -> None:
    place = {"path": str(tmp_path / "runs" / RUN_ID / "checkpoints" / "s1-1"), "sha256": "ab" * 32}
    with writer.ledger.transaction():
        report = worker_pb2.CheckpointReport(run_id=RUN_ID, session=1, step=1, chain="c", **place)
        writer.ledger.checkpoints.add(report)
    writer.ledger.close()
    out = tmp_path / "out.html"
    assert paceline("report", RUN_ID, "-o", out, "--verify", "--directory", tmp_path / "runs").exit_code == 0
    blocks = content_of(out.read_text())["blocks"]
    (rows,) = [block[3] for block in blocks if block[:2] == ["table", "Checkpoints"]]
    assert rows == [["1", "1", place["path"], place["sha256"]]]
    assert any(block[0] == "text" and block[1].endswith("(paceline ledger verify):") for block in blocks)


def test_hostile_text_is_only_text_in_a_browser(report: Path, chromium: Any) -> None:
    shown, said = chromium.new_page(), []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("request", lambda request: said.append(request.url))
    shown.goto(report.as_uri())
    shown.locator(".u-over").nth(2).wait_for(timeout=20_000)
    text = shown.inner_text("main")
    assert "<script>alert(1)</script><img src=x onerror=alert(2)>" in text
    assert "\\u001b[31m\\u202egnp" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert shown.evaluate("document.querySelectorAll('main img, main script').length") == 0
    shown.evaluate("document.body.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))")
    assert shown.evaluate("window.ran") is None
    assert said[0] == report.as_uri()
    assert [each for each in said[1:] if "Content Security Policy" not in each] == []
    shown.close()


def test_the_report_is_in_the_folder_of_the_run(runs: Path) -> None:
    assert paceline("report", RUN_ID, "--directory", runs).exit_code == 0
    assert (runs / RUN_ID / "report.html").is_file()
    missing = paceline("report", "nosuch", "--directory", runs)
    assert missing.exit_code == 1
    assert "no run 'nosuch'" in missing.stderr
    assert "no folder" in paceline("report", RUN_ID, "-o", "/no/x.html", "--directory", runs).stderr
