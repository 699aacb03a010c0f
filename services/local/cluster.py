"""All services of one host as child processes, for `paceline up`, the demo and the end-to-end tests.

    with LocalCluster(Path("runs"), spec.cluster) as cluster:
        client = Client(cluster.address)

The services and the clients of this process find the coordinator's token by an environment variable with the path of
the token's file.

Promises: every service has a log file under `<directory>/logs/`. A service that dies is restarted, with back-off if it
keeps dying, and its death is logged in one line; all services end with the cluster. Only a coordinator that cannot
start at all ends the cluster. The coordinator keeps its port, and so its address, when it is restarted. One cluster at
a time works in a directory, because it takes the directory's lock before it touches anything there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from paceline.calls.token import TOKEN_NAME, VARIABLE, token_path
from paceline.errors import NotFound, PacelineError
from paceline.host.process import require_linux
from paceline.host.resources import THREADS_VARIABLE, threads_beside
from paceline.services.common.access.page_keys import Access, Role
from paceline.services.common.gpus import for_cuda, learner_gpus, named_in, share_gpus, visible_gpus
from paceline.services.common.processes.fork_server import ForkServer
from paceline.services.common.processes.supervisor import MAX_BACKOFF_S, Service, last_lines
from paceline.services.local.folder_lock import FolderLock
from paceline.spec import ClusterSection

LOCK_NAME = "up.lock"
USUAL_PORT, PAGE_PORT = 7070, 7080
"""Ports that the coordinator and its page take by default, if these ports are free."""
NOT_READY_S = 60.0
"""Seconds between two lines that say that the coordinator does not listen yet."""

GRACE_S = 25.0
"""Default of `grace_s`: seconds that a service may take to end after SIGTERM."""

KILL_AFTER_S = 15.0
"""Seconds between the end of a service's grace and the kill: time to leave and to unload."""

EXPLAIN_AFTER_S = 3.0
"""Seconds after which a line names the services that must end and have not ended."""

LEARNER_ENDS = ": the learner ends its step and writes a checkpoint; if it is killed before that, training continues from the previous checkpoint"
WORKERS = ("rollout", "reward", "environment", "learner")
DASHBOARD = "dashboard"
TRACKERS = "trackers"
READERS = (DASHBOARD, TRACKERS)
"""Services that read the coordinator's records; nothing waits for them."""
BEHIND = ("nice", "-n", "10")
"""Launcher of these services: all other services get the processor first."""
ROLES = (*WORKERS, "coordinator", *READERS)
NOTHING_ELSE: Mapping[str, Sequence[str]] = MappingProxyType({})

log = logging.getLogger(__name__)


class LocalCluster:
    """A coordinator, rollout × N, reward × M, environment × E and one learner of K ranks on this host, supervised."""

    coordinator_backoff_s = 10.0
    """Longest back-off in seconds before the coordinator is restarted, because everything waits for it."""

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
        preload: Sequence[str] = (),
    ):
        """`directory` holds the ledger, the runs and `logs/`; `port` 0 takes a free port; `grace_s` is every service's
        `--grace`. `options` are further options of a role's command line, and `launchers` commands that start a role's
        services, such as `ip netns exec NAME`. `say` gets one line for each death. A service that has died `max_deaths`
        times in a row is given up, and `check` then raises (None: never). `gpus` are this host's GPUs, by their names
        in CUDA_VISIBLE_DEVICES; by default they are detected. Services get those GPUs that `cluster` names. If
        `preload` names modules and there are no GPUs, workers are forked from a process that has imported these
        modules; then this process adopts what its descendants leave behind, and the thread that calls
        `start_coordinator` must live as long as the cluster. Raises SpecError if the GPUs cannot be divided."""
        require_linux("LocalCluster")
        self.directory = Path(directory).resolve()
        self.cluster = cluster
        self.address = ""
        """HOST:PORT of the coordinator; empty before it has started."""
        self.failure: PacelineError | None = None
        """The reason why a service was given up; None if none was."""
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
        """File of the coordinator's token, for clients."""
        self._lock = FolderLock(self.directory / LOCK_NAME, "`paceline up`")
        self._failed = threading.Event()
        self._gpus = {
            "rollout": share_gpus(cluster.rollout_gpus, cluster.rollout_workers),
            "reward": share_gpus(cluster.reward_gpus, cluster.reward_workers, "reward"),
            "learner": [learner_gpus(cluster)],
        }
        self._gpu_uses = sum(len(share) for shares in self._gpus.values() for share in shares)
        self._visible = gpus if gpus is not None else visible_gpus()
        self._preload = preload if not self._visible else ()
        self._fork_server: ForkServer | None = None
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
        """Start the coordinator, wait until it listens and return its address. Raises Conflict if another cluster works
        in the directory; PacelineError, with the end of the coordinator's log, if it ends before it listens. Waits
        without a limit for a coordinator that itself waits, for example for room on the disk."""
        self._lock.take()
        os.environ.setdefault(VARIABLE, str(self.token_file))
        logs = self.directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        if self._preload:
            with contextlib.suppress(OSError):  # no room for one more process: the workers start without it
                self._fork_server = ForkServer(
                    self._environment(()), logs / "fork-server.log", self._preload, self._say
                )
        ready_file = logs / "coordinator.address"
        ready_file.unlink(missing_ok=True)
        options = ["--directory", str(self.directory), "--host", self._host, "--grace", str(self._grace_s)]
        command = ["paceline.services.coordinator.main", *options, *self._options.get("coordinator", ())]
        ready = ["--ready-file", str(ready_file)]
        service = self._add("coordinator", [*command, "--port", str(self._port), *ready], max_deaths=1)
        say_at_s = time.monotonic() + NOT_READY_S
        while not ready_file.exists():
            if self._failed.wait(0.02):
                self.check()
            if time.monotonic() > say_at_s:
                say_at_s += NOT_READY_S
                lines = last_lines(service.log_path)
                last_line = f"; its log ends with: {lines[-1]}" if lines else f"; see {service.log_path}"
                self._say(f"the coordinator does not listen yet{last_line}")
        self.address = ready_file.read_text().strip()
        port = self.address.rpartition(":")[2]
        service.command = self._command("coordinator", [*command, "--port", port, *ready])
        service.max_deaths = self._max_deaths
        return self.address

    def start_workers(self) -> None:
        """Start the workers and the learner; no environment workers if `cluster.environment_workers` is None."""
        if self._visible and not named_in(self.cluster) and self.cluster.device != "cpu":
            self._say(
                f"everything runs on CPUs, although this host has GPUs ({len(self._visible)}): name them in cluster.learner_gpus and "
                "cluster.rollout_gpus"
            )
        for role, number in (
            ("rollout", self.cluster.rollout_workers),
            ("reward", self.cluster.reward_workers),
            ("environment", self.cluster.environment_workers or 0),
            ("learner", 1),
        ):
            for _ in range(number):
                self.add(role)

    def start_dashboard(self, port: int) -> Path:
        """Start the dashboard without waiting; return the file that will have its address. `port` 0 takes a free port."""
        ready_file = self.directory / "logs" / "dashboard.address"
        ready_file.unlink(missing_ok=True)
        options = ["--directory", str(self.directory), "--coordinator", self.address, "--host", self._host]
        command = ["paceline.apps.dashboard.main", *options, "--port", str(port), "--ready-file", str(ready_file)]
        self._add(DASHBOARD, command, max_deaths=None)
        return ready_file

    def start_trackers(self) -> None:
        """Start the process that sends runs to the trackers in their specs. Nothing waits for it."""
        options = ["--directory", str(self.directory), "--coordinator", self.address]
        self._add(TRACKERS, ["paceline.apps.tracking.track", *options], max_deaths=None)

    def add(self, role: str) -> str:
        """Start one more service of `role` and return its name. The service may get the name of a removed service that
        has ended. A rollout worker beyond `cluster.rollout_workers` shares the GPUs of the other rollout workers in
        turn."""
        name = f"{role}-{self._free_index(role)}"
        role_options = {
            "learner": ["--ranks", str(self.cluster.learner_ranks), "--nodes", "1"],
            "rollout": ["--http-port", "0"],
        }
        if role in role_options and any(self._gpus[role]):
            role_options[role] += [
                "--device",
                "cuda",
            ]  # a worker that cannot use its GPU fails instead of using the CPU
        options = ["--port", "0", "--name", name, "--grace", str(self._grace_s), *role_options.get(role, [])]
        command = [f"paceline.services.{role}.main", "--coordinator", self.address, *options]
        self._add(role, [*command, *self._options.get(role, ())], self._max_deaths)
        return name

    def remove(self, role: str) -> str:
        """Terminate the newest service of `role` and return its name, without waiting. The service returns its work,
        and is killed if it needs much longer than its grace. Raises NotFound without a service."""
        staying = [service for service in self._services[role] if service.stays]
        if not staying:
            raise NotFound(f"there is no {role} service to remove")
        service = staying[-1]
        service.terminate()
        # Not joined, because `stop` waits for the service itself.
        limit_s = self._grace_s + KILL_AFTER_S
        threading.Thread(target=service.wait_ended, args=(limit_s,), name=f"end of {service.name}", daemon=True).start()
        return service.name

    def size(self, role: str) -> int:
        """Return the number of services of `role`, without services that are being removed."""
        return sum(service.stays for service in self._services[role])

    def resize(self, role: str, size: int) -> None:
        while self.size(role) < size:
            self.add(role)
        while self.size(role) > size:
            self.remove(role)

    def pids(self, role: str) -> dict[int, int]:
        """Return the process ids of the services of `role` by their index, without those that are being restarted."""
        found = {index: service.pid for index, service in enumerate(self._services[role])}
        return {index: pid for index, pid in found.items() if pid is not None}

    def deaths(self, role: str, index: int = 0) -> list[str]:
        """Return how each life of a service has ended, in words, oldest first."""
        return list(self._service(role, index).deaths)

    def log_path(self, role: str, index: int = 0) -> Path:
        return self._service(role, index).log_path

    def kill(self, role: str, index: int = 0, number: signal.Signals = signal.SIGKILL) -> bool:
        """Send a signal to a service and to all its processes. It is restarted after half a second, and this death does
        not count. Return False if the service is just being restarted. Raises NotFound."""
        return self._service(role, index).kill(number)

    def check(self) -> None:
        """Raise the reason if a service was given up."""
        if self.failure is not None:
            raise self.failure

    def wait(self, timeout_s: float) -> bool:
        """Wait until a service is given up, at most `timeout_s`; return whether any was."""
        return self._failed.wait(timeout_s)

    def stop(self) -> None:
        """End all services: first the workers, which return their leases, and the learner, which writes a checkpoint,
        then the coordinator, which receives both. A service that needs longer than its grace is killed."""
        if self._fork_server is not None:
            for service in (service for role in WORKERS for service in self._services[role]):
                if service.pid is None:
                    service.start_no_more()
            self._fork_server.close()
        for roles in ((*READERS, *WORKERS), ("coordinator",)):
            services = [service for role in roles for service in self._services[role]]
            for service in services:
                service.terminate()
            self._wait_ended(services)
        self._lock.release()

    def _wait_ended(self, services: Sequence[Service]) -> None:
        started_s = time.monotonic()
        allowed_s = self._grace_s + KILL_AFTER_S
        while (waited_s := time.monotonic() - started_s) < EXPLAIN_AFTER_S:
            if not any(service.ends for service in services):
                break
            time.sleep(min(0.02, max(0.0, EXPLAIN_AFTER_S - waited_s)))
        if slow := [service.name for service in services if service.ends]:
            learner = any(name.startswith("learner") for name in slow)
            self._say(
                f"waiting for {', '.join(slow)}, {allowed_s:.0f} s at most (--grace {self._grace_s:.0f} and {KILL_AFTER_S:.0f} "
                f"to leave){LEARNER_ENDS if learner else ''}; Ctrl-C ends the wait at once"
            )
        for service in services:
            service.wait_ended(max(0.1, allowed_s - (time.monotonic() - started_s)))

    def _gains_by_fork(self, role: str) -> bool:
        """Return whether a service imports torch itself; several ranks of a learner are separate processes."""
        is_launcher = role == "learner" and self.cluster.learner_ranks > 1
        return role in WORKERS and role not in self._launchers and not is_launcher

    def _add(self, role: str, command: list[str], max_deaths: int | None) -> Service:
        services, index = self._services[role], self._free_index(role)
        name = role if role in ("coordinator", *READERS) else f"{role}-{index}"
        gpus = self._gpus.get(role) or [()]
        service = Service(
            name,
            self._command(role, command),
            self._environment(gpus[index % len(gpus)]),
            self.directory / "logs" / f"{name}.log",
            self._say,
            self._give_up,
            max_deaths,
            self.coordinator_backoff_s if role == "coordinator" else MAX_BACKOFF_S,
            self._fork_server if self._gains_by_fork(role) else None,
        )
        services[index : index + 1] = [service]
        service.start()
        return service

    def _free_index(self, role: str) -> int:
        services = self._services[role]
        return next((index for index, service in enumerate(services) if service.has_ended), len(services))

    def _command(self, role: str, arguments: list[str]) -> list[str]:
        launcher = self._launchers.get(role, BEHIND if role in READERS else ())
        return [*launcher, sys.executable, "-m", *arguments]

    def _environment(self, gpus: tuple[int, ...]) -> dict[str, str]:
        # Beside a GPU, threads copy and convert tensors; more processes than GPUs share these threads.
        threads = threads_beside(self._gpu_uses) if gpus else 1
        return os.environ | {
            THREADS_VARIABLE: str(max(self.cluster.threads_per_process, threads)),
            "CUDA_VISIBLE_DEVICES": for_cuda(gpus, self._visible),
            "PYTHONUNBUFFERED": "1",
            "PYTHONSAFEPATH": "1",  # a user's learner.py in the working directory must not shadow ours
        }

    def _service(self, role: str, index: int) -> Service:
        services = self._services.get(role, [])
        if not 0 <= index < len(services):
            raise NotFound(
                f"there is no {role}-{index}; the roles are {', '.join(ROLES)}, and the services of a role are numbered from 0"
            )
        return services[index]

    def _give_up(self, reason: PacelineError) -> None:
        if self.failure is None:
            self.failure = reason
            self._failed.set()
            self.on_failure()


CHECK_S = 0.1
WAIT_S = 120.0


def start_page(cluster: LocalCluster, host: str, say: Callable[[str], None]) -> None:
    """Start the page of a cluster; a thread waits until the page listens, and prints the link."""
    ready_file = cluster.start_dashboard(free_port(host, PAGE_PORT))
    thread = threading.Thread(target=_say_link, args=(ready_file, cluster.token_file, say), daemon=True)
    thread.start()


def _say_link(ready_file: Path, token_file: Path, say: Callable[[str], None]) -> None:
    waiting = threading.Event()
    for _ in range(int(WAIT_S / CHECK_S)):
        if ready_file.exists():
            address = ready_file.read_text().strip()
            say(f"page at http://{address}/#key={Access(token_file).key(Role.OPERATOR)}")
            return
        waiting.wait(CHECK_S)


def free_port(host: str, usual: int) -> int:
    """Return the usual port, or 0 if it is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, usual))
        except OSError:
            return 0
    return usual
