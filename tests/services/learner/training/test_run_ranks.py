"""Two real ranks of a session: one batch for all before a step, and an export that rank 0 cannot write."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ranks import run_ranks


@pytest.fixture(scope="module")
def met(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each rank."""
    out = tmp_path_factory.mktemp("ranks")
    run_ranks("idle_rank.py", 2, out)
    return [json.loads((out / f"rank.{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.merge
@pytest.mark.slow
def test_ranks_whose_parts_are_of_different_batches_fetch_again(met: list[dict[str, Any]]) -> None:
    assert [rank["chain"] for rank in met] == ["after", "after"]
    assert [rank["fetched"] for rank in met] == [2, 2]


def test_an_export_that_rank_0_cannot_write_leaves_both_where_they_were(met: list[dict[str, Any]]) -> None:
    assert "'./nowhere': no such folder with a config.json" in met[0]["failure"]
    assert [rank["gathered"] for rank in met] == [["bias", "weight"], []]
