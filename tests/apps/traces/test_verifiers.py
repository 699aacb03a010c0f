"""Rollouts of verifiers as traces: one answer with its reward, its recorded tokens, and what is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.apps.traces.conversion import ConversionReport, convert, row_of_rollout
from paceline.apps.traces.spans import Unusable
from paceline.data.traces import TraceKeys, read_trace

SYSTEM = {"parent": None, "message": {"role": "system", "content": "Be brief."}, "sampled": False}
USER = {"parent": 0, "message": {"role": "user", "content": "2+2?"}, "sampled": False}
ANSWER = {"parent": 1, "message": {"role": "assistant", "content": "4", "tool_calls": None}, "sampled": True}
REWARDS = {"right": {"score": 1.0, "weight": 0.5}, "brief": {"score": 0.5}}


def rollout(*nodes: dict[str, Any], **further: Any) -> dict[str, Any]:
    return {
        "id": "t1",
        "task": {"type": "T", "data": {}},
        "nodes": list(nodes),
        "rewards": REWARDS,
        **further,
    }


def test_one_answer_with_the_sum_of_its_rewards() -> None:
    row = row_of_rollout(rollout(SYSTEM, USER, ANSWER))
    trace = read_trace(row, TraceKeys())
    assert trace.prompt == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2+2?"},
    ]
    assert trace.completion == [{"role": "assistant", "content": "4"}]
    assert (trace.reward, trace.tokens) == (1.0, None)
    assert row_of_rollout(rollout(USER | {"parent": None}, ANSWER | {"parent": 0}, rewards={}))["final_reward"] is None


def test_recorded_tokens_are_those_of_the_behaviour_policy() -> None:
    given = USER | {"parent": None, "token_ids": [1, 2], "mask": [False, False]}
    made = ANSWER | {
        "parent": 0,
        "token_ids": [3, 4, 5],
        "mask": [False, True, True],
        "logprobs": [-0.25, -0.5],
    }
    tokens = read_trace(row_of_rollout(rollout(given, made)), TraceKeys()).tokens
    assert tokens is not None
    assert [array.tolist() for array in tokens] == [[1, 2, 3], [4, 5], [-0.25, -0.5]]
    partial = made | {"logprobs": [-0.25]}
    assert read_trace(row_of_rollout(rollout(given, partial)), TraceKeys()).tokens is None


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([SYSTEM, USER], "no answer of the model"),
        ([SYSTEM, USER, ANSWER, ANSWER | {"parent": 2}], "several answers in one rollout"),
        ([ANSWER | {"parent": 7}], "parents are missing"),
        ([ANSWER | {"parent": 0}], "parents are missing"),
    ],
)
def test_rollouts_that_are_no_single_answer_are_left_out(
    tmp_path: Path, nodes: list[dict[str, Any]], reason: str
) -> None:
    with pytest.raises(Unusable, match=reason):
        row_of_rollout(rollout(*nodes))
    path, report = tmp_path / "traces.jsonl", ConversionReport()
    path.write_text(json.dumps(rollout(*nodes)) + "\n" + json.dumps(rollout(SYSTEM, USER, ANSWER)) + "\n")
    (row,) = convert([path], (), report)
    assert row["final_reward"] == 1.0
    assert sum(report.left_out.values()) == 1
