"""For all tests: no clock judges them, and those of the real vLLM run where it is installed (`make test-vllm`)."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import HealthCheck, settings

# A busy machine must not fail a test, and a failure must be due to the change that meets it: no deadline, the same
# examples every time.
settings.register_profile(
    "paceline", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("paceline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs vLLM, with the command that runs it. Where it runs, it and what it imports warn about themselves."""
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            item.add_marker(pytest.mark.filterwarnings("default"))
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))
