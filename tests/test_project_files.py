"""Files that other programs read, such as workflows and issue forms: they parse, and name what exists."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.services.cli.main import main as paceline

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml"))
READ = [
    *(path for path in sorted((ROOT / ".github").rglob("*")) if path.is_file()),
    *(
        ROOT / name
        for name in (".ci/run", ".devcontainer/devcontainer.json", ".editorconfig", ".pre-commit-config.yaml")
    ),
    *(ROOT / name for name in ("AGENTS.md", "CITATION.cff", "Makefile", "constraints.txt")),
]
HOSTS = re.compile(r"pypi\.org|pythonhosted|download\.pytorch\.org|registry\.npmjs|index-url", re.I)


def content(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))


def packages_of_ci() -> set[str]:
    """Return the Debian packages that .ci/run installs for its programs, without Python's own."""
    needs = re.findall(r'^\(?need ".*?" ([a-z0-9 -]+)', (ROOT / ".ci/run").read_text(encoding="utf-8"), flags=re.M)
    return {name for need in needs for name in need.split() if not name.startswith("python3")}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_job_of_a_workflow_is_bounded_and_may_only_read(path: Path) -> None:
    workflow = content(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 120, name
        assert "permissions" not in job, name
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        assert all(re.fullmatch(r"actions/[\w-]+@v\d+", use) for use in uses), name
        assert any("cache" in use for use in uses), name


def test_workflows_run_what_exists() -> None:
    runs = [
        step["run"]
        for path in WORKFLOWS
        for job in content(path)["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    called = {target for run in runs for target in re.findall(r"^make ([\w-]+)", run, flags=re.M)}
    assert called == {"lint", "test", "test-slow", "test-torch-floor", "test-vllm-slow"}
    assert called <= targets()
    assert ".ci/run" in runs
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_checks_run_on_the_oldest_and_a_newer_python() -> None:
    checks = content(ROOT / ".github/workflows/checks.yml")
    assert set(checks[True]) == {"push", "pull_request"}  # YAML 1.1 reads `on` as true
    for job in checks["jobs"].values():
        assert job["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    assert 'requires-python = ">=3.11"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_the_tests_job_and_the_development_container_have_what_the_tests_call() -> None:
    job = content(ROOT / ".github/workflows/checks.yml")["jobs"]["test"]
    installed = set(" ".join(step.get("run", "") for step in job["steps"]).split())
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text(encoding="utf-8"))
    wanted = packages_of_ci() - {"make", "git"}  # the images have them
    assert {"strace", "bubblewrap", "prometheus", "nodejs", "npm", "chromium"} <= wanted
    assert wanted <= installed
    assert wanted <= set(container["postCreateCommand"].split())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_an_issue_form_asks_by_commands_that_exist(path: Path) -> None:
    form = content(path)
    assert form["name"]
    assert form["description"]
    assert any(field.get("validations", {}).get("required") for field in form["body"])
    assert all(field["type"] == "markdown" or field["id"] for field in form["body"])
    named = re.findall(r"`paceline ([a-z]+)", path.read_text(encoding="utf-8"))
    assert set(named) <= set(paceline.list_commands(paceline.make_context("paceline", ["runs"])))


def test_hooks_call_the_locked_tools() -> None:
    lock = (ROOT / "deploy/docker/locks/dev.txt").read_text(encoding="utf-8")
    for repository in content(ROOT / ".pre-commit-config.yaml")["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            assert hook["language"] == "system"
            folder, tool = hook["entry"].split()[0].rsplit("/", 1)
            assert folder == ".venv/bin"
            assert re.search(rf"^{tool}==", lock, flags=re.M), tool


def test_the_citation_names_the_newest_release() -> None:
    citation = content(ROOT / "CITATION.cff")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## ([\d.]+) \((\d{4}-\d\d-\d\d)\)$", changelog, flags=re.M)
    assert (citation["version"], str(citation["date-released"])) == released[0]
    assert citation["license"] == "Apache-2.0"
    assert citation["authors"] == [{"name": "The Paceline authors"}]


@pytest.mark.parametrize("path", READ, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_names_a_package_index(path: Path) -> None:
    assert not HOSTS.search(path.read_text(encoding="utf-8"))


def test_the_page_for_agents_is_short() -> None:
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) <= 60
