"""Hosts that share nothing but a network: each has network, mount and process namespaces of its own, and an empty private disk.

The source tree and the virtual environment are mounted read-only, as an image would be; `/tmp`, which holds the home folder,
is the private disk. A host's end takes its processes and its disk with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOME = "/tmp/home"
SHOWN = [str(path) for path in dict.fromkeys((ROOT, Path(sys.prefix)))]
"""Folders of this machine that the hosts see, read-only."""
SET_UP = f"""
set -e
mount -t tmpfs tmpfs /mnt
number=0
for folder in "$@"; do  # they may lie below /tmp
    number=$((number + 1))
    mkdir /mnt/$number
    mount --bind "$folder" /mnt/$number
done
mount -t tmpfs tmpfs /tmp
number=0
for folder in "$@"; do
    number=$((number + 1))
    mkdir -p "$folder"
    mount --move /mnt/$number "$folder"
    mount -o remount,bind,ro "$folder"
done
mkdir -p {HOME}
ip link set lo up
touch /tmp/ready
exec sleep infinity
"""
KEPT = ("PATH", "LANG", "LD_LIBRARY_PATH", "SSL_CERT_FILE")


def missing() -> str:
    """Return the programs and rights that this machine lacks for such hosts; empty if none."""
    if os.geteuid() != 0:
        return "it needs root"
    lacking = [program for program in ("ip", "unshare", "nsenter", "mount") if shutil.which(program) is None]
    if lacking:
        return f"it needs the program {' and '.join(lacking)}"
    try:
        with Switch() as switch, switch.host("probe"):
            return ""
    except (subprocess.CalledProcessError, TimeoutError, OSError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"the kernel refuses namespaces: {said.strip()}"


class Switch:
    """A bridge that joins the hosts; they reach each other and nothing else."""

    def __init__(self) -> None:
        self._number = 0
        self._hosts: list[Host] = []
        self._count = 0

    def __enter__(self) -> Switch:
        taken = _run("ip", "-o", "addr")
        for self._number in (number for number in range(1, 255) if f"10.89.{number}." not in taken):
            try:
                _run("ip", "link", "add", self._device, "type", "bridge")
                break
            except subprocess.CalledProcessError as error:
                if "File exists" not in error.stderr:  # another process has taken the number meanwhile
                    raise
        _run("ip", "addr", "add", f"10.89.{self._number}.1/24", "dev", self._device)
        _run("ip", "link", "set", self._device, "up")
        return self

    def __exit__(self, *_: object) -> None:
        for host in self._hosts:
            host.end()
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("ip", "link", "del", self._device)

    @property
    def _device(self) -> str:
        return f"hosts{self._number}"

    def host(self, name: str, logs: Path | None = None) -> Host:
        """Return a new host; its services' output goes to files in `logs`."""
        self._count += 1
        address = f"10.89.{self._number}.{self._count + 1}"
        host = Host(name, address, self._device, f"h{os.getpid()}x{self._count}", logs)
        self._hosts.append(host)
        return host


class Host:
    """One host, from its making to `end`. Its programs see no variable of this process but PATH and its like."""

    def __init__(self, name: str, address: str, bridge: str, device: str, logs: Path | None):
        self.name, self.address = name, address
        self._logs = logs
        self._device = device
        self._services: list[subprocess.Popen[bytes]] = []
        self.variables: dict[str, str] = {}
        """Environment variables of its programs."""
        self._holder = subprocess.Popen(
            [
                *(
                    "unshare",
                    "--net",
                    "--mount",
                    "--propagation",
                    "private",
                    "--pid",
                    "--fork",
                    "--mount-proc",
                ),
                *("--kill-child=KILL", "sh", "-c", SET_UP, "sh", *SHOWN),
            ],
            stdin=subprocess.DEVNULL,
        )
        try:
            self._inside = self._wait_for_child()
            _run(
                "ip",
                "link",
                "add",
                device,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                str(self._inside),
            )
            _run("ip", "link", "set", device, "master", bridge)
            _run("ip", "link", "set", device, "up")
            self.run("ip", "addr", "add", f"{address}/24", "dev", "eth0")
            self.run("ip", "link", "set", "eth0", "up")
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(self, *command: str, timeout_s: float = 60.0, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a program there to its end. Raises CalledProcessError unless `check` is False, TimeoutExpired."""
        return subprocess.run(
            self._entering(command),
            env=self._environment(),
            text=True,
            capture_output=True,
            timeout=timeout_s,
            check=check,
        )

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a service there."""
        assert self._logs is not None
        with (self._logs / f"{self.name}.log").open("ab") as log:
            service = subprocess.Popen(
                self._entering(command),
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._services.append(service)
        return service

    def write(self, path: str, text: str) -> None:
        """Write a file on its disk."""
        command = self._entering(("sh", "-c", 'mkdir -p "$(dirname "$0")" && cat > "$0"', path))
        subprocess.run(command, env=self._environment(), input=text, text=True, check=True, timeout=60)

    def stop(self) -> None:
        """Tell its services to end, and wait for that."""
        for service in self._services:
            if service.poll() is None:
                self.run("kill", "-TERM", "-1", check=False)
        for service in self._services:
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.wait(40)

    def end(self) -> None:
        """End it as a loss of power does: every process is killed, and its disk is gone."""
        self._holder.send_signal(signal.SIGKILL)
        self._holder.wait()
        for service in self._services:
            service.kill()
            service.wait()
        # The kernel removes a dead namespace, and its end of the cable, only after its connections have timed out.
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("ip", "link", "del", self._device)

    def _entering(self, command: tuple[str, ...]) -> list[str]:
        return ["nsenter", "-t", str(self._inside), "-n", "-m", "-p", "--wdns=/tmp", *command]

    def _environment(self) -> Mapping[str, str]:
        own = {name: os.environ[name] for name in KEPT if name in os.environ}
        path = os.pathsep.join((str(Path(sys.executable).parent), own.get("PATH", "")))
        threads = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
        return own | threads | {"HOME": HOME, "PATH": path, "TMPDIR": "/tmp", "HF_HUB_OFFLINE": "1"} | self.variables

    def _wait_for_child(self) -> int:
        """Return the process id of the namespace's first process, once its disk is there."""
        deadline_s = time.monotonic() + 20.0
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children")
        while time.monotonic() < deadline_s:
            if self._holder.poll() is not None:
                raise OSError(f"unshare ended with status {self._holder.returncode}")
            for text in _read(children).split():
                if Path(f"/proc/{text}/root/tmp/ready").exists():
                    return int(text)
            time.sleep(0.02)
        raise TimeoutError("the namespace is not set up after 20 s")


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _run(*command: str) -> str:
    return subprocess.run(command, text=True, capture_output=True, timeout=60, check=True).stdout


def wait_for(path: Path, text: str, timeout_s: float) -> Iterator[str]:
    """Yield the lines of a log up to the first with `text`. Raises TimeoutError."""
    deadline_s, seen = time.monotonic() + timeout_s, 0
    while time.monotonic() < deadline_s:
        lines = _read(path).splitlines()
        for line in lines[seen:]:
            yield line
            if text in line:
                return
        seen = len(lines)
        time.sleep(0.1)
    raise TimeoutError(f"{path} has no line with {text!r} after {timeout_s:g} s")
