"""`paceline status` as a user types it."""

from __future__ import annotations

import json

import pytest
from command_line import paceline

from paceline.client import Client
from paceline.v1 import status_pb2

ADVICE = "the rollout pool limits the run: its 2 workers complete 50% of what the learner can train"


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> status_pb2.StatusResponse:
    response = status_pb2.StatusResponse(
        run_id="math-1", state="running", step=7, max_num_steps=100, advice=ADVICE, queued_runs=2
    )
    response.pools.add(name="rollout", ready=2, starting=1, desired=5, need=4.4, rate=1.0, demand=4.0, occupied=0.97)
    response.pools.add(name="reward", ready=1, desired=1, is_scaled=True)
    monkeypatch.setattr(Client, "status", lambda _: response)
    return response


@pytest.mark.usefixtures("answer")
def test_words_come_first_then_the_pools() -> None:
    result = paceline("status")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert result.stdout.splitlines()[:2] == ["math-1 is running, step 7 of 100; 2 more in the queue", ADVICE]
    assert lines[3] == ["rollout", "2", "1", "5", "4.4", "1.00", "4.00", "97%", "no"]
    assert lines[4] == ["reward", "1", "0", "1", "-", "-", "-", "0%", "yes"]


@pytest.mark.usefixtures("answer")
def test_json_has_the_same_facts() -> None:
    facts = json.loads(paceline("status", "--json").stdout)
    assert facts["advice"] == ADVICE
    assert facts["pools"][0]["need"] == 4.4
    assert facts["pools"][1]["is_scaled"]


def test_without_a_run_there_is_only_the_sentence(answer: status_pb2.StatusResponse) -> None:
    answer.Clear()
    answer.advice = "no run trains on groups now"
    assert paceline("status").stdout == "no run trains on groups now\n"
