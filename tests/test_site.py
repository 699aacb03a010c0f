"""The documentation as a site: it builds without a warning, loads nothing from elsewhere, and its reference is complete."""

from __future__ import annotations

import html
import inspect
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import errors
from paceline.apps.dashboard.backends import methods
from paceline.client import Client
from paceline.records import Records
from paceline.services.cli.main import main
from paceline.services.common.reporting import metric_table
from paceline.spec.keys import keys

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "docs" / "site" / "build.py"
NAMES: dict[str, Any] = runpy.run_path(str(SCRIPT), run_name="site_build")
build: Callable[[Path], Path] = NAMES["build"]
loaded_from_elsewhere: Callable[[Path], list[str]] = NAMES["loaded_from_elsewhere"]


def make(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    made = make(folder)
    assert made.returncode == 0, made.stdout + made.stderr
    return folder / "html"


def text_of(page: Path) -> str:
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text(encoding="utf-8")))


@pytest.mark.merge
@pytest.mark.slow
def test_every_page_of_the_documentation_is_in_the_site(site: Path) -> None:
    pages = [path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md")]
    made = [
        site / (page.with_name("index.html") if page.name == "README.md" else page.with_suffix(".html"))
        for page in pages
    ]
    made += [site / "docs" / "reference" / f"{Path(name).stem}.html" for name in NAMES["reference"]()]
    assert len(made) > 40
    assert [str(page) for page in made if not page.is_file()] == []


def test_every_key_rpc_command_and_metric_that_exists_is_in_the_reference(site: Path) -> None:
    spec, commands = text_of(site / "docs/reference/configuration.html"), text_of(site / "docs/reference/commands.html")
    protos, metrics = text_of(site / "docs/reference/protos.html"), text_of(site / "docs/reference/metrics.html")
    lacking = [path for path, key in keys().items() if key.section is None and f"{path} (" not in spec]
    lacking += [name for name in main.entries if f"paceline {name}" not in commands]
    lacking += [
        call for call in methods() if not set(call.rpartition(".")[2].split("/")) <= set(re.findall(r"\w+", protos))
    ]
    lacking += [metric.name for part in metric_table.PARTS for metric in part.metrics if metric.name not in metrics]
    assert lacking == []


def test_every_public_name_and_method_of_python_and_every_error_is_in_the_reference(site: Path) -> None:
    page = (site / "docs/reference/client.html").read_text(encoding="utf-8")
    names = [f"paceline.client.Client.{name}" for name in public(Client)]
    names += [f"paceline.records.Records.{name}" for name in public(Records)]
    classes = inspect.getmembers(errors, inspect.isclass)
    names += [f"paceline.errors.{name}" for name, value in classes if value.__module__ == errors.__name__]
    assert len(names) > 40
    assert [name for name in names if f'id="{name}"' not in page] == []
    text = text_of(site / "docs/reference/client.html")
    assert [name for name in paceline.__all__ if name != "RunSpec" and name not in text] == []
    assert (inspect.getdoc(Client.submit) or "").split("\n")[0] in text


def public(owner: type) -> list[str]:
    return [name for name, value in vars(owner).items() if inspect.isfunction(value) and not name.startswith("_")]


def test_the_search_finds_a_key(site: Path) -> None:
    assert "loss_fn.off_policy_mask_threshold" in (site / "search" / "search_index.json").read_text(encoding="utf-8")


@pytest.mark.merge
@pytest.mark.slow
def test_what_leads_nowhere_and_a_page_in_no_menu_are_warnings_and_end_the_build(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A strict build ends with the number of its warnings, whichever they are."""
    NAMES["stage"](tmp_path / "pages")
    page = tmp_path / "pages" / "docs" / "use" / "lora.md"
    links = "[there](no_such_page.md)\n\n[there](data.md#no-such-heading)\n\n![there](no_such_picture.svg)\n"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{links}", encoding="utf-8")
    (tmp_path / "pages" / "docs" / "lost.md").write_text("# Lost\n", encoding="utf-8")
    with pytest.raises(SystemExit):
        build(tmp_path)
    printed = "".join(capfd.readouterr())
    assert "Aborted with 4 warnings in strict mode" in printed
    for named in ("no_such_page.md", "no-such-heading", "no_such_picture.svg", "lost.md"):
        assert named in printed, printed


def test_what_a_page_would_load_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text('<link rel="stylesheet" href="https://fonts.example/css">')
    (tmp_path / "worse.html").write_text("<script src='//cdn.example/x.js'></script>")
    (tmp_path / "fine.html").write_text(
        '<a href="https://elsewhere.example">a link</a><script src="assets/x.js"></script>'
    )
    assert loaded_from_elsewhere(tmp_path) == ["bad.html", "worse.html"]
