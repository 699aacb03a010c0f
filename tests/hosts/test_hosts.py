"""The short form of `make campaign NAME=hosts`."""

from __future__ import annotations

from pathlib import Path

import pytest
from hosts_campaign import run_campaign
from isolated_host import missing
from model_chain import run_chain

pytestmark = pytest.mark.slow


@pytest.mark.merge
def test_a_run_on_hosts_that_share_nothing_survives_the_loss_of_a_node(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(f"hosts with namespaces of their own: {why}")
    outcome = run_campaign(15, tmp_path)
    assert outcome.problems == []
    assert outcome.is_good, outcome


def test_a_model_goes_from_run_to_run_and_to_another_host_by_the_store_alone(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(f"hosts with namespaces of their own: {why}")
    chain = run_chain(400, 5, tmp_path)
    assert [run["state"] for run in chain.runs] == ["succeeded", "succeeded"]
    assert chain.reward > 0.01
    assert len(chain.completions) == 4
    assert all(text.isdigit() and len(text) <= 3 for text in chain.completions)
