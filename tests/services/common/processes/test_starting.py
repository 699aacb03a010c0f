"""Environment variables that services set for libraries before they import them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

IMPORT = """
import importlib, sys
importlib.import_module(sys.argv[1])
assert "torch" not in sys.modules, "its OpenMP library has read the environment before the service sets it"
"""
READ = """
import os, sys
from paceline.services.common.processes.starting import set_library_variables
assert "torch" not in sys.modules
set_library_variables()
import torch
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize("service", ["environment", "learner", "reward", "rollout"])
def test_a_service_sets_them_before_it_imports_torch(service: str) -> None:
    subprocess.run([sys.executable, "-c", IMPORT, f"paceline.services.{service}.main"], check=True)


def test_a_policy_of_the_user_stands() -> None:
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env={name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
        | {"OMP_WAIT_POLICY": "PASSIVE"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["None"]


@pytest.mark.parametrize(
    ("given", "expected"), [pytest.param("", "1000", marks=[pytest.mark.merge, pytest.mark.slow]), ("5", "5")]
)
def test_busy_waits_are_short_unless_the_user_says_otherwise(given: str, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"GOMP_SPINCOUNT": given, "OMP_DISPLAY_ENV": "VERBOSE"} if given else {"OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr, "torch's OpenMP library read another value"
