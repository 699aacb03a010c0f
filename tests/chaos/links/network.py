"""A network of the rollout workers' own, as a host of their own would have: a namespace, joined to this one by a veth pair.

    drop    a firewall rule of the namespace drops every packet, in and out, without a word. TCP goes on where it was when it ends
    delay   packets are late by 50 to 150 ms (netem), or, in a kernel without it, wait for their turn on a line of 1 Mbit/s (tbf)

All that such a worker exchanges with anybody crosses it: control, exchange and weights. What listens for it on this side
has to do so at `Network.near`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter

QDISCS = (
    ("netem", "delay", "100ms", "50ms"),
    ("tbf", "rate", "1mbit", "burst", "16kb", "latency", "400ms"),
)
"""Ways to delay packets, best first."""


def missing() -> str:
    """Return the programs and rights that this machine lacks for such a network; empty if none."""
    if os.geteuid() != 0:
        return "it needs root"
    lacking = [program for program in ("ip", "tc", "iptables") if shutil.which(program) is None]
    if lacking:
        return f"it needs the program {' and '.join(lacking)}"
    try:
        Network().close()
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} said {error.stderr.strip()}"
    return ""


class Network:
    """Is there from its making to `close`. Raises subprocess.CalledProcessError where the kernel does not allow it."""

    def __init__(self) -> None:
        self.name = f"paceline-{os.getpid()}"
        """Of the namespace."""
        self.met: Counter[str] = Counter()
        """Packets that were dropped."""
        number = _free_number()
        self.near, self.far = f"10.88.{number}.1", f"10.88.{number}.2"
        """Address of this side, and of the workers."""
        self._device, self._far_device = f"chaos{number}", "chaos"
        _run("ip", "netns", "add", self.name)
        try:
            self._set_up()
        except BaseException:
            self.close()
            raise

    @property
    def launcher(self) -> tuple[str, ...]:
        """The command line before that of a program that is to run there."""
        return "ip", "netns", "exec", self.name

    def harm(self, kind: str) -> None:
        """Begins `drop` or `delay`, in place of another. Raises ValueError for anything else."""
        self.repair()
        if kind == "drop":
            for chain in ("INPUT", "OUTPUT"):
                self._run_there("iptables", "--wait", "-A", chain, "-j", "DROP")
        elif kind == "delay":
            _run("tc", "qdisc", "add", "dev", self._device, "root", *self._qdisc)
            self._run_there("tc", "qdisc", "add", "dev", self._far_device, "root", *self._qdisc)
        else:
            raise ValueError(f"a network cannot suffer {kind!r}")

    def repair(self) -> None:
        """Lets every packet through again, at once."""
        self.met["dropped"] += self.count_dropped()
        self._run_there("iptables", "--wait", "-F")
        for device, run in ((self._device, _run), (self._far_device, self._run_there)):
            if any(qdisc[0] in run("tc", "qdisc", "show", "dev", device) for qdisc in QDISCS):
                run("tc", "qdisc", "del", "dev", device, "root")

    def count_dropped(self) -> int:
        """Packets that the present silence has swallowed."""
        rules = self._run_there("iptables", "--wait", "-nvxL")
        return sum(int(packets) for packets in re.findall(r"^\s*(\d+)\s+\d+\s+DROP", rules, re.MULTILINE))

    def close(self) -> None:
        """Takes the namespace away; the pair goes with it."""
        _run("ip", "netns", "delete", self.name)

    def _set_up(self) -> None:
        peer = ("peer", "name", self._far_device, "netns", self.name)
        _run("ip", "link", "add", self._device, "type", "veth", *peer)
        _run("ip", "address", "add", f"{self.near}/30", "dev", self._device)
        _run("ip", "link", "set", self._device, "up")
        inside = ("ip", "-n", self.name)
        _run(*inside, "address", "add", f"{self.far}/30", "dev", self._far_device)
        for device in (self._far_device, "lo"):
            _run(*inside, "link", "set", device, "up")
        self._run_there("iptables", "--wait", "-nvxL")
        self._qdisc = self._choose_qdisc()

    def _choose_qdisc(self) -> tuple[str, ...]:
        """The first that the kernel has."""
        for qdisc in QDISCS[:-1]:
            try:
                _run("tc", "qdisc", "add", "dev", self._device, "root", *qdisc)
            except subprocess.CalledProcessError:
                continue
            _run("tc", "qdisc", "del", "dev", self._device, "root")
            return qdisc
        return QDISCS[-1]

    def _run_there(self, *command: str) -> str:
        return _run(*self.launcher, *command)


def _free_number() -> int:
    """Of a network of four addresses that this machine does not use."""
    used = _run("ip", "-o", "-4", "address")
    first = os.getpid() % 256
    return next(n % 256 for n in range(first, first + 256) if f" 10.88.{n % 256}." not in used)


def _run(*command: str) -> str:
    """Return the output of a command. Raises subprocess.CalledProcessError."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
