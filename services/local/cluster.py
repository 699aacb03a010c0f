"""All services of one host as child processes: what `paceline up`, the demo and the end-to-end tests start.

    with LocalCluster(Path("runs"), spec.cluster) as cluster:
        client = Client(cluster.address)

The services and the clients of this process find the coordinator's token by the environment, which is set to its file.

Promises: every service has a log file of its own under `<directory>/logs/`; one that dies is started again and the
death is said in one line; all of them end with the cluster. A service that keeps dying is tried again ever more slowly while
the others go on; only a coordinator that cannot even start once ends the cluster. The coordinator keeps its port over its
deaths, so nobody has to be told a new address. One cluster at a time works in a directory: its lock is taken before anything
there is touched. Losing any service loses no sample: that is the services' own doing, not this module's.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from paceline.errors import NotFound, PacelineError
from paceline.spec import ClusterSection
from paceline.token import TOKEN_NAME, VARIABLE, token_path
from services.common.gpus import for_cuda, learner_gpus, named_in, share_gpus, visible_gpus
from services.common.processes.restart_policy import MAX_BACKOFF_S
from services.common.processes.supervisor import Service, last_lines
from services.local.folder_lock import FolderLock

LOCK_NAME = "up.lock"
NOT_READY_S = 60.0
"""After so long without listening, and again each time, it is said that the coordinator still starts."""

COORDINATOR_BACKOFF_S = 10.0
"""Everything waits for the coordinator, so a new one is tried at least this often."""

GRACE_S = 25.0
"""Seconds that a service has, unless it is said otherwise, to end in good order after SIGTERM."""

KILL_AFTER_S = 15.0
"""Seconds after its grace until it is killed; they are for what is no part of it, as leaving and unloading."""

ROLES = ("rollout", "reward", "learner", "coordinator")
NOTHING_ELSE: Mapping[str, Sequence[str]] = MappingProxyType({})

log = logging.getLogger(__name__)


class LocalCluster:
    """A coordinator, rollout × N, reward × M and one learner of K ranks on this host, supervised."""

    def __init__(
        self,
        directory: str | Path,
        cluster: ClusterSection,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        grace_s: float = GRACE_S,
        options: Mapping[str, Sequence[str]] = NOTHING_ELSE,
        launchers: Mapping[str, Sequence[str]] = NOTHING_ELSE,
        say: Callable[[str], None] = log.warning,
        max_deaths: int | None = None,
        gpus: Sequence[str] | None = None,
    ):
        """`directory` holds the ledger, the runs and `logs/`; `port` 0 takes a free one; `grace_s` is every service's
        `--grace`; `options` are further ones of a role's command line, and `launchers` what a role's services are started
        by, such as `ip netns exec NAME`; `say` gets one line for each death. With `max_deaths` a service that dies so often
        in a row is given up, and `check` raises: for whoever would rather fail than wait. `gpus` are
        this host's, as CUDA_VISIBLE_DEVICES calls them; by default they are looked for. Services get those that `cluster`
        names. Raises SpecError when these cannot be shared out.
        """
        self.directory = Path(directory).resolve()
        self.cluster = cluster
        self.address = ""
        """host:port of the coordinator, once it has started."""
        self.failure: PacelineError | None = None
        """Why a service was given up, if one was."""
        self.on_failure: Callable[[], None] = lambda: None
        """Called once, from another thread, when a service is given up."""
        self._host = host
        self._port = port
        self._grace_s = grace_s
        self._options = options
        self._launchers = launchers
        self._say = say
        self._max_deaths = max_deaths
        self.token_file = token_path(self.directory / TOKEN_NAME)
        """Where the coordinator keeps its token, for clients."""
        self._lock = FolderLock(self.directory / LOCK_NAME, "`paceline up`")
        self._failed = threading.Event()
        self._gpus = {
            "rollout": share_gpus(cluster.rollout_gpus, cluster.rollout_workers),
            "reward": share_gpus(cluster.reward_gpus, cluster.reward_workers, "reward"),
            "learner": [learner_gpus(cluster)],
        }
        self._visible = gpus if gpus is not None else visible_gpus()
        self._services: dict[str, list[Service]] = {role: [] for role in ROLES}

    def __enter__(self) -> LocalCluster:
        try:
            self.start_coordinator()
            self.start_workers()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_coordinator(self) -> str:
        """Starts the coordinator, waits until it listens and returns its address. Raises Conflict when another cluster works
        in the directory, and PacelineError, with the end of its log, when the coordinator ends before it listens: one
        that cannot start once will not start the second time. One that waits, as for room on the disk, is waited for.
        """
        self._lock.take()
        os.environ.setdefault(VARIABLE, str(self.token_file))
        logs = self.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        ready_file = logs / "coordinator.address"
        ready_file.unlink(missing_ok=True)
        options = ["--directory", str(self.directory), "--host", self._host, "--grace", str(self._grace_s)]
        command = ["services.coordinator.main", *options, *self._options.get("coordinator", ())]
        ready = ["--ready-file", str(ready_file)]
        service = self._add("coordinator", [*command, "--port", str(self._port), *ready], max_deaths=1)
        say_at_s = time.monotonic() + NOT_READY_S
        while not ready_file.exists():
            if self._failed.wait(0.02):
                self.check()
            if time.monotonic() > say_at_s:
                say_at_s += NOT_READY_S
                lines = last_lines(service.log_path)
                said = f"; its log ends with: {lines[-1]}" if lines else f"; see {service.log_path}"
                self._say(f"the coordinator does not listen yet{said}")
        self.address = ready_file.read_text().strip()
        port = self.address.rpartition(":")[2]
        service.command = self._command("coordinator", [*command, "--port", port, *ready])
        service.max_deaths = self._max_deaths
        return self.address

    def start_workers(self) -> None:
        """Starts the workers and the learner; they find the coordinator by themselves."""
        if self._visible and not named_in(self.cluster) and self.cluster.device != "cpu":
            self._say(
                f"everything runs on CPUs, and this host has GPUs ({len(self._visible)}): name them in cluster.learner_gpus and "
                "cluster.rollout_gpus"
            )
        for role, number in (
            ("rollout", self.cluster.rollout_workers),
            ("reward", self.cluster.reward_workers),
            ("learner", 1),
        ):
            for _ in range(number):
                self.add(role)

    def add(self, role: str) -> str:
        """Starts one more service of `role` and returns its name. A rollout worker beyond `cluster.rollout_workers`
        takes its turn among the GPUs of the others.
        """
        name = f"{role}-{len(self._services[role])}"
        own = {"learner": ["--ranks", str(self.cluster.learner_ranks)], "rollout": ["--http-port", "0"]}
        if role in own and any(self._gpus[role]):
            own[role] += [
                "--device",
                "cuda",
            ]  # one that cannot use its GPU says so, and does not go on without
        options = ["--port", "0", "--name", name, "--grace", str(self._grace_s), *own.get(role, [])]
        command = [f"services.{role}.main", "--coordinator", self.address, *options]
        self._add(role, [*command, *self._options.get(role, ())], self._max_deaths)
        return name

    def pids(self, role: str) -> dict[int, int]:
        """Process ids of the services of `role` by their index; a service that is being restarted has none."""
        found = {index: service.pid for index, service in enumerate(self._services[role])}
        return {index: pid for index, pid in found.items() if pid is not None}

    def deaths(self, role: str, index: int = 0) -> list[str]:
        """How each life of a service has ended, in words, oldest first."""
        return list(self._service(role, index).deaths)

    def log_path(self, role: str, index: int = 0) -> Path:
        """Where a service's output goes."""
        return self._service(role, index).log_path

    def kill(self, role: str, index: int = 0, number: signal.Signals = signal.SIGKILL) -> bool:
        """Sends a signal to a service and everything that it started; it is brought back after half a second and the
        death does not count against it. False when it is just being restarted. Raises NotFound.
        """
        return self._service(role, index).kill(number)

    def check(self) -> None:
        """Raises the reason when a service was given up."""
        if self.failure is not None:
            raise self.failure

    def wait(self, timeout_s: float) -> bool:
        """Waits until a service is given up, at most `timeout_s`; whether one was."""
        return self._failed.wait(timeout_s)

    def stop(self) -> None:
        """Ends all services in good order: SIGTERM to the workers and the learner, which hand back their leases and write
        a checkpoint, then to the coordinator, which takes both. One that needs longer than its grace is killed.
        """
        for roles in (("rollout", "reward", "learner"), ("coordinator",)):
            services = [service for role in roles for service in self._services[role]]
            for service in services:
                service.terminate()
            deadline_s = time.monotonic() + self._grace_s + KILL_AFTER_S
            for service in services:
                service.wait_ended(max(0.1, deadline_s - time.monotonic()))
        self._lock.release()

    def _add(self, role: str, command: list[str], max_deaths: int | None) -> Service:
        services = self._services[role]
        name = role if role == "coordinator" else f"{role}-{len(services)}"
        gpus = self._gpus.get(role, [()])
        service = Service(
            name,
            self._command(role, command),
            self._environment(gpus[len(services) % len(gpus)]),
            self.directory / "logs" / f"{name}.log",
            self._say,
            self._give_up,
            max_deaths,
            COORDINATOR_BACKOFF_S if role == "coordinator" else MAX_BACKOFF_S,
        )
        services.append(service)
        service.start()
        return service

    def _command(self, role: str, arguments: list[str]) -> list[str]:
        return [*self._launchers.get(role, ()), sys.executable, "-m", *arguments]

    def _environment(self, gpus: tuple[int, ...]) -> dict[str, str]:
        return os.environ | {
            "OMP_NUM_THREADS": str(self.cluster.threads_per_process),
            "CUDA_VISIBLE_DEVICES": for_cuda(gpus, self._visible),
            "PYTHONUNBUFFERED": "1",
            "PYTHONSAFEPATH": "1",  # a user's learner.py in the working directory must not shadow ours
        }

    def _service(self, role: str, index: int) -> Service:
        services = self._services.get(role, [])
        if not 0 <= index < len(services):
            raise NotFound(f"there is no {role}-{index}; the roles are {', '.join(ROLES)}, counted from 0")
        return services[index]

    def _give_up(self, reason: PacelineError) -> None:
        if self.failure is None:
            self.failure = reason
            self._failed.set()
            self.on_failure()
