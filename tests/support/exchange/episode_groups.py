"""A group of two episodes: the first has two turns in one row and a second row, the second was given up or has one turn."""

from __future__ import annotations

import json

import numpy as np

from paceline.groups import Completion, Group, Rows, Turn, VersionSpan
from paceline.v1 import exchange_pb2 as pb


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def row(
    prompt: tuple[int, ...],
    tokens: tuple[int, ...],
    sampled: tuple[int, ...],
    step: int = 3,
    reason: str = "stop",
) -> Completion:
    """A row whose sampled tokens have the log-probability -1 and one span for each stretch of them."""
    mask = np.array(sampled, bool)
    spans, start = [], None
    for index, value in enumerate([*mask.tolist(), False]):
        if value and start is None:
            start = index
        if not value and start is not None:
            spans.append(VersionSpan(1, step, start, index))
            start = None
    return Completion(
        ids(*tokens),
        np.where(mask, -1.0, 0.0).astype(np.float32),
        tuple(spans),
        reason,
        prompt_ids=ids(*prompt),
        sampled_T=mask,
    )


def episode_group(rewards: list[float] | None = None, *, group_id: int = 7) -> Group:
    """Sample 0: rows [5 6 | 7 8 _9_ 10], [5 9 | 11]; sample 1: row [5 6 | 12 13]. `_9_` was read, all others sampled."""
    rows = (
        row((5, 6), (7, 8, 9, 10), (1, 1, 0, 1)),
        row((5, 9), (11,), (1,), step=4),
        row((5, 6), (12, 13), (1, 1)),
    )
    turns = (Turn(0, 0, 2, 0.5), Turn(0, 3, 4, float("nan")), Turn(1, 0, 1, 1.0), Turn(2, 0, 2, 0.0))
    rewards_CF = None if rewards is None else np.array(rewards, np.float32)[:, None]
    return Group(
        group_id,
        rows[0].prompt_ids,
        rows,
        rewards_CF=rewards_CF,
        rows=Rows(2, (0, 0, 1), turns),  # type: ignore[arg-type]
    )


def episode_texts() -> list[pb.SampleText]:
    """The texts of its samples."""
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    first = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "assistant", "content": "two"},
    ]
    return [
        pb.SampleText(messages_json=json.dumps(first), ending="done", reward=1.0, turn_rewards=1.5),
        pb.SampleText(
            messages_json=json.dumps([{"role": "assistant", "content": "no"}]),
            ending="truncated",
            detail="max_turns 1",
        ),
    ]
