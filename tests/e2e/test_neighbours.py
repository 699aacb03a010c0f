"""Services of the revision before beside those of today: a run goes on, or the older side is named."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.client import Client, state_name
from paceline.spec import ClusterSection, RunSpec
from services.coordinator.audit.verify import verify
from services.coordinator.ledger.ledger import Ledger
from services.local.cluster import LocalCluster

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
BEFORE = "afcf022"
"""The last revision before runs had bundles, stores, nodes and orders of an operator."""
WITHOUT_NEWER_OPTIONS = """
import os, sys
arguments = sys.argv[1:]
if "--nodes" in arguments:
    at = arguments.index("--nodes")
    del arguments[at : at + 2]
os.execvp(arguments[0], arguments)
"""
WORKERS = ("rollout", "reward", "learner")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A command line before that of a service, which runs it from the earlier revision."""
    folder = tmp_path_factory.mktemp("before")
    archive = subprocess.run(["git", "archive", BEFORE], cwd=ROOT, capture_output=True, check=False)
    if shutil.which("tar") is None or archive.returncode:
        pytest.skip(f"the history has no revision {BEFORE}")
    subprocess.run(["tar", "-x"], cwd=folder, input=archive.stdout, check=True)
    filtering = folder / "without_newer_options.py"
    filtering.write_text(WITHOUT_NEWER_OPTIONS)
    return ["env", f"PYTHONPATH={folder}", sys.executable, str(filtering)]


@pytest.mark.parametrize("older", ["workers", "coordinator"])
def test_a_run_goes_on_beside_the_revision_before(
    older: str, before: list[str], make_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    roles = WORKERS if older == "workers" else ("coordinator",)
    sizes = ClusterSection(rollout_workers=1, reward_workers=1, learner_ranks=2)
    with (
        LocalCluster(tmp_path, sizes, launchers=dict.fromkeys(roles, before), max_deaths=3) as cluster,
        Client(cluster.address) as client,
    ):
        run = client.wait(client.submit(make_spec(grpo={"max_num_steps": 6})).run_id, timeout_s=180)
        assert (state_name(run), run.step) == ("succeeded", 6), run.message
    ledger = Ledger(tmp_path / "ledger.sqlite", read_only=True)
    try:
        assert verify(ledger, run.run_id).problems == []
    finally:
        ledger.close()
