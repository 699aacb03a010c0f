"""Certificates that are renewed, and then replaced by those of another authority, while a run trains."""

from __future__ import annotations

import contextlib
import shutil
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from forked_services import ForkedCluster

from paceline.client import Client
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.tls.authority import issue, make_authority, renew
from paceline.tls.certificates import read_certificate
from paceline.tls.folder import VARIABLE

pytestmark = pytest.mark.slow

TIMEOUT_S = 240.0
GROUPS_OF_STEP = 8


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The certificates of every process of this host, and of the clients of this test."""
    make_authority(tmp_path / "ca")
    made = tmp_path / "tls"
    shutil.copytree(issue(tmp_path / "ca", "up", "up"), made)
    monkeypatch.setenv(VARIABLE, str(made))
    return made


@pytest.fixture
def cluster(folder: Path, tmp_path: Path) -> Iterator[LocalCluster]:
    sizes = ClusterSection(rollout_workers=2, device="cpu")
    with ForkedCluster(tmp_path / "runs", sizes, max_deaths=1) as running:
        yield running


def until_step(client: Client, run_id: str, step: int) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while client.get(run_id).step < step:
        assert time.monotonic() < deadline_s, client.get(run_id)
        time.sleep(0.1)


def presented(address: str) -> int:
    """Return the serial number of the certificate that a server presents to a new connection."""
    host, port = address.split(":")
    return read_certificate(ssl.get_server_certificate((host, int(port)))).serial


def test_a_run_goes_on_while_certificates_are_replaced(
    cluster: LocalCluster,
    folder: Path,
    make_spec: Callable[..., RunSpec],
    gated: Callable[[int], tuple[dict[str, Any], Path]],
    tmp_path: Path,
) -> None:
    reward, gate = gated(2 * GROUPS_OF_STEP)
    with Client(cluster.address) as client:
        run_id = client.submit(make_spec(rewards=[reward], grpo={"max_num_steps": 10})).run_id
        until_step(client, run_id, 1)
        before = {member.member_id for member in client.members()}
        make_authority(tmp_path / "other")
        renewed = renew(shutil.copytree(tmp_path / "ca", tmp_path / "again"), "up")
        for number, made in enumerate((renewed, issue(tmp_path / "other", "up", "up")), 1):
            step = client.get(run_id).step
            shutil.copytree(made, folder, dirs_exist_ok=True)
            serial = read_certificate((folder / "tls.crt").read_bytes()).serial
            assert presented(cluster.address) == serial
            for member in client.members():
                if member.address:
                    assert presented(member.address) == serial, member
            opened = gate.with_suffix(".next")
            opened.write_text(str(2 * (number + 1) * GROUPS_OF_STEP))
            opened.replace(gate)
            until_step(client, run_id, step + 1)
        with Client(cluster.address) as newcomer:  # knows the new authority alone
            assert {member.member_id for member in newcomer.members()} == before
        gate.write_text("")  # all of them
        ended = client.wait(run_id, timeout_s=TIMEOUT_S)
    assert ended.step == 10, ended.message
    with contextlib.closing(Ledger(tmp_path / "runs" / "ledger.sqlite", read_only=True)) as ledger:
        again = "SELECT COUNT(*) FROM groups WHERE run_id = ? AND attempt > 1"
        assert ledger.db.execute(again, (run_id,)).fetchone()[0] == 0
        sessions = "SELECT COUNT(DISTINCT session) FROM receipts WHERE run_id = ?"
        assert ledger.db.execute(sessions, (run_id,)).fetchone()[0] == 1
        assert verify(ledger, run_id).problems == []
