"""A report is one file in which hostile text is only text, and charts are files in two formats."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from command_line import paceline
from PIL import Image
from trained_ledger import RUN_ID, Writer

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202egnp" + "x" * 30_000


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    writer = Writer(tmp_path, str(tmp_path / "model"), {"prompt": HOSTILE, "answer": "2"})
    writer.train_a_step()
    with writer.ledger.transaction():
        for step in range(3):
            content = {"step": step, "time": 1.0, "reward": step / 4, "loss": 1.0, "age/0": 3}
            writer.ledger.add_event(RUN_ID, "step", content)
        writer.ledger.add_event(RUN_ID, "warning", {"message": HOSTILE[:100]})
    writer.ledger.close()
    return tmp_path / "runs"


class Tags(HTMLParser):
    """Tags and attributes of a document."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs


def test_a_report_is_one_file_that_runs_nothing(runs: Path, tmp_path: Path) -> None:
    result = paceline("report", RUN_ID, "-o", tmp_path / "out.html", "--verify", "--directory", runs)
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out.html").read_text()
    found = Tags(text)
    assert not {"script", "img", "link", "iframe", "object"} & set(found.tags)
    assert [name for name, _ in found.attributes if name.startswith("on") or name in ("src", "href")] == []
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert "\\x1b[31m\\u202egnp" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "characters more" in text
    for part in (
        "All records agree",
        "<b>5</b> tokens generated = <b>5</b> trained",
        "grpo.max_num_steps",
        "reward 1.25",
    ):
        assert part in text
    assert len(re.findall("<svg", text)) == 3
    assert "default-src 'none'" in text


def test_the_report_is_in_the_folder_of_the_run(runs: Path) -> None:
    assert paceline("report", RUN_ID, "--directory", runs).exit_code == 0
    assert (runs / RUN_ID / "report.html").is_file()
    missing = paceline("report", "nosuch", "--directory", runs)
    assert missing.exit_code == 1
    assert "no run 'nosuch'" in missing.stderr
    assert "no folder" in paceline("report", RUN_ID, "-o", "/no/x.html", "--directory", runs).stderr


def test_metrics_are_drawn_as_svg(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "curve.svg"
    result = paceline("plot", RUN_ID, "reward", "age/*", "-o", out, "--directory", runs)
    assert result.exit_code == 0, result.output
    chart = ElementTree.fromstring(out.read_bytes())
    space = "{http://www.w3.org/2000/svg}"
    first, second = chart.findall(f"{space}polyline")
    points = [tuple(map(float, point.split(","))) for point in first.attrib["points"].split()]
    assert points == [(64.0, 210.0), (344.0, 122.0), (624.0, 34.0)]
    assert len(second.attrib["points"].split()) == 3
    texts = [each.text for each in chart.iter(f"{space}text")]
    assert {"reward", "age/0", RUN_ID} <= set(texts)


def test_metrics_are_drawn_as_png(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "curve.png"
    assert paceline("plot", RUN_ID, "-o", out, "--directory", runs).exit_code == 0
    image = Image.open(io.BytesIO(out.read_bytes()))
    assert image.size == (1280, 480)
    colours = {colour for _, colour in image.getcolors(1 << 20) or []}
    assert (0x34, 0x65, 0xA4) in colours


def test_unknown_metrics_and_runs_are_named(runs: Path, tmp_path: Path) -> None:
    result = paceline("plot", RUN_ID, "rewad", "-o", tmp_path / "x.svg", "--directory", runs)
    assert "has no metric 'rewad'; did you mean 'reward'?" in result.stderr
    result = paceline("plot", RUN_ID, "reward", "--directory", runs)
    assert "'reward' is no run; a page has all metrics" in result.stderr
