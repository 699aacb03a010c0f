"""Cores and the threads of processes that share them."""

from __future__ import annotations

import os

from paceline.host.resources import thread_variables, threads_beside, usable_cores


def test_processes_share_the_cores_of_this_process() -> None:
    if hasattr(os, "sched_getaffinity"):
        assert usable_cores() == len(os.sched_getaffinity(0))
    assert [threads_beside(processes, cores=10) for processes in (0, 1, 3, 20)] == [10, 10, 3, 1]
    assert thread_variables(2, {}) == {"OMP_NUM_THREADS": str(threads_beside(2))}
    assert thread_variables(1, {}) == {"OMP_NUM_THREADS": str(usable_cores())}
    assert thread_variables(2, {"OMP_NUM_THREADS": "1"}) == {}
