"""The short form of `make hosts`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts_campaign import run_campaign
from isolated_host import missing

pytestmark = pytest.mark.slow


def test_a_run_on_hosts_that_share_nothing_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(f"hosts with namespaces of their own: {why}")
    outcome = run_campaign(15, tmp_path)
    assert outcome.problems == []
    assert outcome.is_good, outcome
