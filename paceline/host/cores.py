"""Cores of this machine, and the compute threads of processes that share them."""

from __future__ import annotations

import os
from collections.abc import Mapping

THREADS_VARIABLE = "OMP_NUM_THREADS"
"""Environment variable from which PyTorch takes its number of compute threads."""


def usable_cores() -> int:
    """Return the cores on which this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_beside(processes: int) -> int:
    """Return the compute threads of one of `processes` equal processes that share this machine's cores, at least 1."""
    return max(1, usable_cores() // max(1, processes))


def thread_variables(processes: int, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that gives each of `processes` its share of the cores; empty where `environment` has it already.

    Without it PyTorch takes every core for each of them.
    """
    return {} if THREADS_VARIABLE in environment else {THREADS_VARIABLE: str(threads_beside(processes))}
