"""Environment variables that services set for libraries before they import them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

READ = """
import os, sys
from paceline.services.common.processes.starting import set_library_variables
assert "torch" not in sys.modules
set_library_variables()
import torch
print(os.environ["GOMP_SPINCOUNT"])
"""


@pytest.mark.parametrize(("given", "expected"), [("", "1000"), ("5", "5")])
def test_busy_waits_are_short_unless_the_user_says_otherwise(given: str, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {"GOMP_SPINCOUNT": given, "OMP_DISPLAY_ENV": "VERBOSE"} if given else {"OMP_DISPLAY_ENV": "VERBOSE"}
    done = subprocess.run([sys.executable, "-c", READ], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected]
    assert f"GOMP_SPINCOUNT = '{expected}'" in done.stderr, "torch's OpenMP library read another value"
