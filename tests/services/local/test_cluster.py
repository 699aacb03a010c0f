"""The supervisor with small children that really die, and the coordinator's place in a local cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_ends import has_ended

from paceline.client import Client
from paceline.errors import Conflict, NotFound, PacelineError
from paceline.services.common.processes.supervisor import Service
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LOCK_NAME, LocalCluster
from paceline.services.local.folder_lock import FolderLock
from paceline.spec import ClusterSection
from paceline.spec.reading import parse_spec

DEADLINE_S = 60.0


class Reports:
    """Lines that a service's supervisor reported, and an event for each kind."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.faults: list[PacelineError] = []
        self.gave_up = threading.Event()

    def give_up(self, fault: PacelineError) -> None:
        self.faults.append(fault)
        self.gave_up.set()


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def start(tmp_path: Path, reports: Reports) -> Iterator[Callable[..., Service]]:
    """Return a function that starts a Python one-liner as a supervised service, which ends with the test."""
    services: list[Service] = []

    def start(code: str, *, program: str = sys.executable, **options: Any) -> Service:
        service = Service(
            "child-0",
            [program, "-c", code],
            dict(os.environ),
            tmp_path / "child-0.log",
            reports.said.append,
            reports.give_up,
            **options,
        )
        services.append(service)
        service.start()
        return service

    yield start
    for service in services:
        service.terminate()
        service.wait_ended(DEADLINE_S)


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that another process makes true; fail at the deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "waited too long"
        time.sleep(0.01)


def test_a_child_that_dies_is_started_again_and_the_death_is_said(
    start: Callable[..., Service], reports: Reports, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    service = start(
        f"import pathlib, signal, sys; mark = pathlib.Path({str(mark)!r})\n"
        "if not mark.exists(): mark.touch(); sys.exit('the disk is full')\n"
        "mark.with_suffix('.second').touch(); signal.pause()"
    )
    until((tmp_path / "mark.second").exists)
    assert reports.said == [
        "child-0 ended with exit status 1, and starts again in 0.5 s; its log says: the disk is full"
    ]
    assert list(service.deaths) == ["child-0 ended with exit status 1"]
    words, end = (tmp_path / "child-0.log").read_text().splitlines()
    assert words == "the disk is full"
    assert end.endswith(" WARNING paceline.services.common.processes.supervisor: child-0 ended with exit status 1")


def test_a_killed_child_comes_back_under_another_pid(start: Callable[..., Service], reports: Reports) -> None:
    service = start("import signal; signal.pause()")
    until(lambda: service.pid is not None)
    first = service.pid
    assert service.kill()
    until(lambda: service.pid not in (None, first))
    assert list(service.deaths) == ["child-0 was killed by SIGKILL"]
    assert reports.said == ["child-0 was killed by SIGKILL, and starts again in 0.5 s"]


def test_the_line_that_says_why_a_child_died_is_said_and_not_what_comes_after_it(
    start: Callable[..., Service], reports: Reports, tmp_path: Path
) -> None:
    code = "import sys; print('Error: no model', *'abcdef', sep='\\n', flush=True); sys.exit(2)"
    start(code, max_deaths=2, max_backoff_s=0.01)
    assert reports.gave_up.wait(DEADLINE_S)
    assert reports.said == [
        "child-0 ended with exit status 2, and starts again in 0.01 s; its log says: Error: no model"
    ]
    assert str(reports.faults[0]) == (
        f"child-0 ended with exit status 2. Its log {tmp_path / 'child-0.log'} ends with:\n"
        "  Error: no model\n  ...\n  b\n  c\n  d\n  e\n  f"
    )


def test_an_error_that_a_killed_child_survived_is_not_why_it_died(
    start: Callable[..., Service], reports: Reports
) -> None:
    start(
        "import os, signal; print('Error: tried again', 'at work', sep='\\n', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    until(lambda: bool(reports.said))
    assert reports.said[0] == "child-0 was killed by SIGKILL, and starts again in 0.5 s; its log says: at work"


def test_a_child_is_given_up_with_its_last_words_where_that_is_asked_for(
    start: Callable[..., Service], reports: Reports, tmp_path: Path
) -> None:
    service = start(
        "import os; print('no model at /nowhere', flush=True); os._exit(3)", max_deaths=2, max_backoff_s=0.01
    )
    assert reports.gave_up.wait(DEADLINE_S)
    assert str(reports.faults[0]) == (
        f"child-0 ended with exit status 3. Its log {tmp_path / 'child-0.log'} ends with:\n  no model at /nowhere"
    )
    assert len(service.deaths) == 2
    assert service.pid is None


def test_a_child_that_keeps_dying_is_never_given_up_and_soon_said_rarely(
    start: Callable[..., Service], reports: Reports
) -> None:
    service = start("echo no model; exit 1", program="/bin/sh", max_backoff_s=0.01)
    until(lambda: len(service.deaths) >= 12)
    assert not reports.faults
    said = reports.said
    assert len(said) == 6
    assert said[3] == "child-0 ended with exit status 1, and starts again in 0.01 s; its log says: no model"
    assert said[4:] == [
        f"child-0 has died {times} times the same way: it ended with exit status 1, and starts again in 0.01 s; "
        "its log says: no model"
        for times in (5, 10)
    ]


def test_a_program_that_does_not_exist_is_given_up(reports: Reports, tmp_path: Path) -> None:
    service = Service(
        "child-0",
        ["/no/such/program"],
        {},
        tmp_path / "log",
        reports.said.append,
        reports.give_up,
        max_deaths=1,
    )
    service.start()
    assert reports.gave_up.wait(DEADLINE_S)
    assert "No such file" in str(reports.faults[0])
    service.terminate()
    service.wait_ended(DEADLINE_S)


def test_what_a_dead_child_left_in_its_group_dies_too(start: Callable[..., Service], tmp_path: Path) -> None:
    pid_file = tmp_path / "grandchild"
    start(
        "import pathlib, subprocess, sys, os\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"path = pathlib.Path({str(pid_file)!r})\n"
        "path.with_suffix('.part').write_text(str(child.pid)); path.with_suffix('.part').replace(path)\n"
        "os._exit(1)"
    )
    until(pid_file.exists)
    grandchild = int(pid_file.read_text())
    until(lambda: has_ended(grandchild))


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(
    start: Callable[..., Service], reports: Reports, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    service = start(
        "import pathlib, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(ready)!r}).touch()\nwhile True: signal.pause()"
    )
    until(ready.exists)
    pid = service.pid
    assert pid is not None
    service.terminate()
    service.wait_ended(0.2)
    assert has_ended(pid)
    assert reports.said == ["child-0 did not stop within 0 s and is killed"]


def test_children_die_with_their_supervisor(tmp_path: Path) -> None:
    """The supervisor itself is killed, so nothing of it can clean up."""
    code = (
        "import os, pathlib, sys, time\nfrom paceline.services.common.processes.supervisor import Service\n"
        f"s = Service('child-0', [sys.executable, '-c', 'import signal; signal.pause()'], dict(os.environ),"
        f" pathlib.Path({str(tmp_path / 'log')!r}), print, print)\n"
        "s.start()\nwhile s.pid is None: time.sleep(0.01)\nprint(s.pid, flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        child = int(supervisor.stdout.readline())
        assert not has_ended(child)
        supervisor.kill()
    until(lambda: has_ended(child))


class Noting(LocalCluster):
    """Notes its lines, and restarts its coordinator after a tenth of a second."""

    coordinator_backoff_s = 0.1

    def __init__(self, directory: Path, **options: Any):
        self.said: list[str] = []
        super().__init__(directory, ClusterSection(), say=self.said.append, **options)


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Noting]:
    """A coordinator that is told to leave more of the disk free than there is."""
    cluster = Noting(tmp_path_factory.mktemp("full"), options={"coordinator": ["--min-free-mb", "99999999"]})
    try:
        cluster.start_coordinator()
        yield cluster
        last = cluster.pids("coordinator")[0]
    finally:
        cluster.stop()
    assert has_ended(last)


def test_the_coordinator_keeps_its_address_over_a_death(full: Noting) -> None:
    until(lambda: answers(full.address))
    first, said = full.pids("coordinator")[0], len(full.said)
    full.kill("coordinator")
    until(lambda: full.pids("coordinator").get(0, first) != first)
    until(lambda: answers(full.address))
    assert full.deaths("coordinator")[-1] == "coordinator was killed by SIGKILL"
    assert full.failure is None
    with pytest.raises(NotFound, match="no rollout-7"):
        full.kill("rollout", 7)
    (line,) = full.said[said:]
    assert "coordinator was killed by SIGKILL" in line


def test_what_the_coordinator_is_told_to_leave_free_closes_admission(full: Noting, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    tree = {
        "policy": {"model_name": "m"},
        "data": {"train": f"file://{tmp_path}/train.jsonl"},  # so that no file has to be sent
        "rewards": [{"function": "exact_match"}],
    }
    with Client(full.address, timeout_s=DEADLINE_S) as client:
        run_id = client.submit(parse_spec(tree)).run_id
        said = next(event.content for event in client.watch(run_id) if event.kind == "warning")
        assert "--min-free-mb is 99999999" in said["message"]
        assert client.get(run_id).groups["admitted"] == 0


def test_a_coordinator_that_cannot_start_says_why_at_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    cluster = LocalCluster(tmp_path, ClusterSection(), say=lambda line: None)
    try:
        with pytest.raises(PacelineError, match="another coordinator has the ledger"):
            cluster.start_coordinator()
        assert len(cluster.deaths("coordinator")) == 1
    finally:
        cluster.stop()
        ledger.close()
    lock = FolderLock(tmp_path / LOCK_NAME, "test", "directory")
    lock.take()  # the cluster has released it
    lock.release()


def test_a_second_cluster_in_a_directory_is_refused_before_it_touches_anything(full: Noting) -> None:
    for _ in range(2):  # nothing of the first refusal blocks the second
        second = LocalCluster(full.directory, ClusterSection(), say=lambda line: None)
        with pytest.raises(Conflict, match=rf"another `paceline up` \(process {os.getpid()}\) works in"):
            second.start_coordinator()
        second.stop()
    assert (full.directory / "logs" / "coordinator.address").read_text().strip() == full.address
    assert "another coordinator" not in (full.directory / "logs" / "coordinator.log").read_text()


@pytest.mark.merge
@pytest.mark.slow
def test_a_coordinator_killed_again_and_again_ends_nothing(tmp_path: Path) -> None:
    """From outside, at once after each start, more often than any number of deaths that used to end the cluster."""
    cluster = Noting(tmp_path)
    try:
        address, killed = cluster.start_coordinator(), {0}
        for _ in range(4):
            until(lambda: cluster.pids("coordinator").get(0, 0) not in killed)
            pid = cluster.pids("coordinator")[0]
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        with Client(address, wait_s=DEADLINE_S) as client:
            assert client.runs() == []  # the call waits until one lives long enough
        assert cluster.failure is None
        assert set(cluster.deaths("coordinator")) == {"coordinator was killed by SIGKILL"}
    finally:
        cluster.stop()


def answers(address: str) -> bool:
    with Client(address, timeout_s=5.0) as client:
        try:
            client.runs()
        except PacelineError:
            return False
        return True


def test_a_frozen_child_is_killed_like_any_other(start: Callable[..., Service]) -> None:
    service = start("import signal; signal.pause()")
    until(lambda: service.pid is not None)
    pid = service.pid
    assert pid is not None
    assert service.kill(signal.SIGSTOP)
    service.terminate()
    service.wait_ended(0.2)
    assert has_ended(pid)
    assert not service.deaths


@pytest.mark.merge
@pytest.mark.slow
def test_a_worker_dies_with_a_killed_supervisor_whatever_its_grace(tmp_path: Path) -> None:
    """A service can ask the kernel for SIGTERM at its starter's end; with work under way it would stay for its grace."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom paceline.spec import ClusterSection\n"
        "from paceline.services.local.cluster import LocalCluster\n"
        f"cluster = LocalCluster(Path({str(tmp_path)!r}), ClusterSection(), grace_s=600.0)\n"
        "cluster.start_coordinator(); cluster.add('reward')\n"
        "log = cluster.log_path('reward')\n"
        "while not (log.exists() and 'member of' in log.read_text()): time.sleep(0.05)\n"
        "print(cluster.pids('reward')[0], cluster.pids('coordinator')[0], flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(pid) for pid in supervisor.stdout.readline().split()]
        assert len(pids) == 2
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # so that nothing less than SIGKILL ends it
        supervisor.kill()
    for pid in pids:
        until(lambda pid=pid: has_ended(pid))  # type: ignore[misc]


def test_a_service_that_takes_long_to_end_is_named_with_the_time_it_has(
    start: Callable[..., Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark, told = tmp_path / "mark", tmp_path / "told"
    service = start(
        "import pathlib, signal, sys, time\n"
        "def end(*_):\n"
        f"    while not pathlib.Path({str(told)!r}).exists(): time.sleep(0.01)\n"
        "    sys.exit(0)\n"
        f"signal.signal(signal.SIGTERM, end); pathlib.Path({str(mark)!r}).touch(); signal.pause()"
    )
    until(mark.exists)
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        told.touch()

    monkeypatch.setattr("paceline.services.local.cluster.EXPLAIN_AFTER_S", 0.1)
    cluster = LocalCluster(tmp_path / "runs", ClusterSection(), say=say, grace_s=7, gpus=())
    service.name = "learner-0"
    cluster._services["learner"].append(service)
    cluster.stop()
    assert said == [
        "waiting for learner-0, 22 s at most (--grace 7 and 15 to leave): the learner ends its step and writes a checkpoint; "
        "if it is killed before that, training continues from the previous checkpoint; Ctrl-C ends the wait at once"
    ]
    assert not service.ends


def test_processes_with_gpus_share_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.host.resources.usable_cores", lambda: 96)
    sizes = ClusterSection(
        learner_ranks=2, learner_gpus=(0, 1), rollout_workers=2, rollout_gpus=(2, 3), threads_per_process=4
    )
    cluster = LocalCluster(tmp_path / "runs", sizes, gpus=("0", "1", "2", "3"))
    assert cluster._environment((0, 1))["OMP_NUM_THREADS"] == "24"
    assert cluster._environment(())["OMP_NUM_THREADS"] == "4"


def test_a_pool_is_resized_and_a_removed_service_is_no_death(tmp_path: Path) -> None:
    """Small children in place of the workers; the newest leaves first, and its name is used again."""
    said: list[str] = []
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); signal.pause()"
    cluster = LocalCluster(
        tmp_path, ClusterSection(), launchers={"reward": [sys.executable, "-c", code]}, say=said.append
    )
    (tmp_path / "logs").mkdir()
    try:
        cluster.resize("reward", 3)
        until(lambda: len(cluster.pids("reward")) == 3)
        kept = cluster.pids("reward")[0]
        cluster.resize("reward", 1)
        assert cluster.size("reward") == 1
        until(lambda: list(cluster.pids("reward")) == [0])
        assert cluster.pids("reward")[0] == kept
        until(lambda: cluster._free_index("reward") == 1)
        assert cluster.add("reward") == "reward-1"
        assert cluster.size("reward") == 2
        with pytest.raises(NotFound, match="no rollout service to remove"):
            cluster.remove("rollout")
    finally:
        cluster.stop()
    assert not any(cluster.deaths("reward", index) for index in range(2))
    assert not said
