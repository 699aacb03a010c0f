"""Two sites on one machine: a network namespace each, and a slow link in between. Near is where the learner is."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from slow_link.link import DEVICE, enter

NEAR, FAR = "10.88.0.1", "10.88.0.2"
MTU = 9000
"""Large packets, as network cards make of small ones: the link's processor time counts in the measurement."""
PROBE_BYTES = 25_000_000
PROBE = """
import socket, sys, time
begin = time.monotonic()
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=30) as peer:
    round_trip_s = time.monotonic() - begin
    received, begin = 0, time.monotonic()
    while data := peer.recv(1 << 20):
        received += len(data)
print(round_trip_s * 1e3, received * 8e-6 / (time.monotonic() - begin))
"""


def missing() -> str:
    """Return what this machine lacks for namespaces and a link between them; empty if nothing."""
    if os.geteuid() != 0:
        return "it needs root for network namespaces"
    if shutil.which("ip") is None:
        return "it needs the program ip (iproute2)"
    if not Path("/dev/net/tun").exists():
        return "it needs /dev/net/tun"
    return ""


class Sites:
    """The namespaces and the link while it is open; the calling thread is moved to the near one and stays there."""

    def __init__(self, round_trip_ms: float, mbit: float) -> None:
        self._round_trip_ms = round_trip_ms
        self._mbit = mbit
        self.near, self.far = (f"paceline-{place}-{os.getpid()}" for place in ("near", "far"))

    def __enter__(self) -> Sites:
        for namespace in (self.near, self.far):
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        self._link = subprocess.Popen(
            [
                *(sys.executable, str(Path(__file__).with_name("link.py")), self.near, self.far),
                *("--one-way-ms", str(self._round_trip_ms / 2), "--mbit", str(self._mbit)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._link.stdout is not None
        if self._link.stdout.readline() != "up\n":
            raise SystemExit("the link did not come up")
        for namespace, address in ((self.near, NEAR), (self.far, FAR)):
            _ip("-n", namespace, "address", "add", f"{address}/24", "dev", DEVICE)
            _ip("-n", namespace, "link", "set", DEVICE, "mtu", str(MTU), "up")
        enter(self.near)
        return self

    def __exit__(self, *_: object) -> None:
        self._link.kill()
        self._link.wait()
        for namespace in (self.near, self.far):
            _ip("netns", "delete", namespace)

    def command(self, namespace: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` in a namespace."""
        return ["ip", "netns", "exec", namespace, *command]

    def measure(self) -> dict[str, float]:
        """Measure a TCP connection over the link: the time to connect and the rate of a transfer to the far side."""
        with socket.create_server((NEAR, 0)) as server:

            def serve() -> None:
                peer, _ = server.accept()
                with peer:
                    peer.sendall(bytes(PROBE_BYTES))

            thread = threading.Thread(target=serve)
            thread.start()
            port = str(server.getsockname()[1])
            command = self.command(self.far, [sys.executable, "-c", PROBE, NEAR, port])
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
            thread.join()
        return {"round_trip_ms": round(float(said[0]), 2), "mbit_per_s": round(float(said[1]), 1)}

    def received_bytes(self) -> int:
        """Bytes that have come over the link to the far side so far."""
        table = self.command(self.far, ["cat", "/proc/net/dev"])
        lines = subprocess.run(table, check=True, capture_output=True, text=True).stdout.splitlines()
        (line,) = (line for line in lines if line.strip().startswith(f"{DEVICE}:"))
        return int(line.partition(":")[2].split()[0])


def until_listening(host: str, port: int, within_s: float) -> None:
    """Return when somebody accepts connections there. Raises SystemExit when nobody does."""
    deadline_s, pause = time.monotonic() + within_s, threading.Event()
    while time.monotonic() < deadline_s:
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return
        except OSError:
            pause.wait(0.1)
    raise SystemExit(f"nobody listens at {host}:{port} after {within_s:.0f} s")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
