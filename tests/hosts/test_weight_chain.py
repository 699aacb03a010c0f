"""A version along a chain of hosts that are network namespaces with shaped links; one host dies in the middle of it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from benchmarks.weight_cases.shaped_hosts import AgentHost, Bridge, Source, missing, send_plans
from paceline.groups import Version

SIZE_BYTES, MBIT, WAIT_S = 8_000_000, 50.0, 120.0


@pytest.mark.slow
def test_the_chain_closes_over_a_dead_host_and_the_learner_sends_one_copy(tmp_path: Path) -> None:
    if lacking := missing():
        pytest.skip(lacking)
    hosts: list[AgentHost] = []
    with Bridge() as bridge:
        try:
            hosts = [AgentHost(tmp_path, *bridge.namespace(MBIT)) for _ in range(5)]
            source, first, dead, *rest = hosts
            learner = Source(source, SIZE_BYTES)
            announced = learner.stage(Version(1, 1))
            send_plans(announced, [first, dead, *rest])
            dead.replies.get(timeout=WAIT_S)  # it is in the middle
            dead.signal(signal.SIGKILL)
            for host in (first, *rest):
                host.complete(Version(1, 1), WAIT_S)
            # The next version goes to a joiner of the chain, from its neighbour.
            announced = learner.stage(Version(1, 2))
            send_plans(announced, [first, *rest])
            held = [host.complete(Version(1, 2), WAIT_S) for host in (first, *rest)]
            assert [one.transfer.upstream.split(":")[0] for one in held] == [
                source.address,
                first.address,
                rest[0].address,
            ]
            assert held[0].transfer.received_bytes == learner.layout.size_bytes
        finally:
            for host in hosts:
                host.end()
