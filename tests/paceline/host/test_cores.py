"""Cores and the threads of processes that share them."""

from __future__ import annotations

import os

import pytest

from paceline.host import resources as cores


def test_processes_share_the_cores_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(os, "sched_getaffinity"):
        assert cores.usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.setattr(cores, "usable_cores", lambda: 10)
    assert [cores.threads_beside(processes) for processes in (0, 1, 3, 20)] == [10, 10, 3, 1]
    assert cores.thread_variables(2, {}) == {"OMP_NUM_THREADS": "5"}
    assert cores.thread_variables(2, {"OMP_NUM_THREADS": "1"}) == {}
