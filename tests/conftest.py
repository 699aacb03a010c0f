"""Tests of the real vLLM run where it is installed: `make test-vllm`."""

from __future__ import annotations

import importlib.util

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs vLLM, with the command that runs it. Where it runs, it and what it imports warn about themselves."""
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            item.add_marker(pytest.mark.filterwarnings("default"))
            if missing:
                item.add_marker(pytest.mark.skip(reason="needs vLLM: make test-vllm"))
