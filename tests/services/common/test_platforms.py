"""On another platform than Linux what starts services fails with one sentence, and the client and the records are imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from paceline.errors import InvalidInput
from paceline.host.process import require_linux
from paceline.services.cli.running.up import up
from paceline.services.coordinator.main import main as coordinator
from paceline.services.demo.run import main as demo
from paceline.services.environment.main import main as environment
from paceline.services.host_agent.main import main as host_agent
from paceline.services.learner.main import main as learner
from paceline.services.local.cluster import LocalCluster
from paceline.services.local.one_call import train
from paceline.services.reward.main import main as reward
from paceline.services.rollout.main import main as rollout
from paceline.spec import ClusterSection

WITHOUT_LINUX = """
import os, select, signal, socket, sys
ABSENT = {
    os: "memfd_create pidfd_open sched_getaffinity sched_setaffinity fdatasync copy_file_range splice eventfd setns unshare "
    "O_DIRECT O_TMPFILE O_PATH MFD_CLOEXEC MFD_ALLOW_SEALING posix_fallocate posix_fadvise",
    signal: "pidfd_send_signal SIGRTMIN SIGRTMAX SIGPWR",
    socket: "SO_PEERCRED TCP_USER_TIMEOUT TCP_KEEPIDLE SOCK_CLOEXEC AF_NETLINK",
    select: "epoll",
}
for module, names in ABSENT.items():
    for name in names.split():
        module.__dict__.pop(name, None)
"""


@pytest.mark.parametrize("command", [up, demo, coordinator, rollout, reward, environment, learner, host_agent])
def test_services_refuse_another_platform(
    command: click.Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(command, [], prog_name="paceline x")
    assert ended.exit_code == 1
    assert ended.output.startswith("Error: paceline x needs Linux, and this is darwin; on macOS paceline.Client, ")
    assert len(ended.output.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_calls_from_python_refuse_another_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(InvalidInput, match=r"^paceline\.train needs Linux, and this is win32"):
        train("spec.yaml", directory=tmp_path / "runs")
    with pytest.raises(InvalidInput, match=r"^LocalCluster needs Linux"):
        LocalCluster(tmp_path / "runs", ClusterSection())
    assert not (tmp_path / "runs").exists()


def test_linux_is_accepted() -> None:
    require_linux("paceline up")


@pytest.mark.parametrize(
    "code",
    [
        "import paceline; paceline.Client, paceline.RunSpec, paceline.RunState, paceline.Event",
        "import paceline.records, paceline.spec.reading, paceline.data.rows",
        "from paceline.services.cli.main import main; main(['submit', '--help'])",
        "from paceline.services.cli.main import main; main(['samples', '--help'])",
        "from paceline.services.cli.main import main; main(['ledger', 'verify', '--help'])",
        "from paceline.services.cli.main import main; main(['--help'])",
    ],
)
def test_the_client_and_the_records_are_imported_without_calls_of_linux(code: str) -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_LINUX + code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
