"""One version along a chain of hosts whose links are shaped, against the time to one host and against a copy from the source to each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline.groups import Version
from weight_cases.shaped_hosts import AgentHost, Bridge, Source, send_plans

TIMEOUT_S = 600.0


def measure(folder: Path, size_bytes: int, num_hosts: int, mbit: float, rounds: int) -> dict[str, Any]:
    """Seconds until all hosts have a version, in turns to one host, along the chain, and from the source to each."""
    hosts: list[AgentHost] = []
    with Bridge() as bridge:
        try:
            hosts = [AgentHost(folder, *bridge.namespace(mbit)) for _ in range(num_hosts + 1)]
            source = Source(hosts[0], size_bytes)
            seconds: dict[str, list[float]] = {"one": [], "chain": [], "star": []}
            copies: list[float] = []
            step = 0
            for number in range(rounds):
                ways = {"one": hosts[1:2], "chain": hosts[1:]} | ({"star": hosts[1:]} if not number else {})
                for way, receivers in ways.items():
                    step += 1
                    took_s, sent = _deliver(source, receivers, Version(1, step), way != "star")
                    seconds[way].append(took_s)
                    if way == "chain":
                        copies.append(sent / size_bytes)
        finally:
            for host in hosts:
                host.end()
    one_s, chain_s = min(seconds["one"]), min(seconds["chain"])
    return {
        "bytes": size_bytes,
        "hosts": num_hosts,
        "mbit": mbit,
        "one_s": round(one_s, 3),
        "chain_s": round(chain_s, 3),
        "star_s": round(min(seconds["star"]), 3),
        "rate_of_one": round(size_bytes * 8 / 1e6 / one_s / mbit, 3),
        "chain_time_over_one_host": round(chain_s / one_s, 3),
        "learner_uplink_copies": round(max(copies), 3),
    }


def _deliver(source: Source, receivers: list[AgentHost], version: Version, chained: bool) -> tuple[float, int]:
    before = _sent_bytes(source.host)
    announced = source.stage(version)
    started_s = time.monotonic()
    send_plans(announced, receivers, chained)
    for host in receivers:
        host.complete(version, TIMEOUT_S)
    return time.monotonic() - started_s, _sent_bytes(source.host) - before


def _sent_bytes(host: AgentHost) -> int:
    """Bytes that the host's link has carried out, as its kernel counts them."""
    for line in Path(f"/proc/{host.process.pid}/net/dev").read_text().splitlines():
        if line.strip().startswith("eth0:"):
            return int(line.split(":")[1].split()[8])
    raise RuntimeError(f"{host.namespace} has no eth0")
