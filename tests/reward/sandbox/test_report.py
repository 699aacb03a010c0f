"""What isolates programs here, told from real probes."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.reward.sandbox import choosing, make_sandbox
from paceline.reward.sandbox.choosing import AUTO, MEANS, describe_kernel, probe, report
from paceline.reward.sandbox.protocol import SandboxFailed
from paceline.reward.sandbox.readable import Readable


def test_each_backend_holds_or_has_a_reason() -> None:
    found = report()
    assert sorted([*found.holding, *found.reasons]) == sorted(AUTO)
    for name in found.reasons:
        assert isinstance(probe(name, Readable.of_interpreter()), str)
    if found.holding:
        assert make_sandbox().name == found.holding[0]
        assert list(found.means) == ["files", "network", "processes", "memory limit", "kernel"]
        assert not any("{" in text for text in found.means.values())


def test_every_backend_has_means() -> None:
    assert set(MEANS) == set(AUTO)
    assert len({tuple(means) for means in MEANS.values()}) == 1


def test_where_nothing_holds_nothing_isolates(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(readable: Readable) -> object:
        raise SandboxFailed("it is not installed")

    monkeypatch.setattr(choosing, "LOCAL", dict.fromkeys(AUTO, absent))
    found = report()
    assert (found.holding, found.means) == ((), {})
    assert found.reasons == dict.fromkeys(AUTO, "it is not installed")


def test_the_kernel_is_told(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert describe_kernel(cpuinfo, lambda: b"").startswith("shared with the host")
    cpuinfo.write_text("processor : 0\nflags : fpu hypervisor sse\n")
    assert describe_kernel(cpuinfo, lambda: b"").startswith("shared with all of this virtual machine")
    assert describe_kernel(cpuinfo, lambda: b"[ 0.0] Starting gVisor...").startswith("gVisor's")
    assert describe_kernel()
