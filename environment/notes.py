"""What a turn's record says besides its tokens, and the texts of a finished sample."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import xxhash

from paceline.chat.messages import Json
from paceline.v1 import exchange_pb2 as pb


def json_text(value: Any) -> str:
    """Return a value as JSON, the same for equal values. Half surrogate pairs, which no wire takes, are written as escapes."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def digest(value: Any) -> str:
    """Return XXH3-128 over a value as JSON."""
    return xxhash.xxh3_128(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def clean(text: str) -> str:
    """Return a text that UTF-8 can hold."""
    return text.encode(errors="replace").decode()


def rewards_of(notes: Iterable[pb.TurnNote]) -> float | None:
    """Return the sum of the rewards of turns; None where no turn had one."""
    rewards = [note.reward for note in notes if note.HasField("reward")]
    return math.fsum(rewards) if rewards else None


def sample_text(
    messages: Sequence[Json],
    ending: str,
    detail: str = "",
    reward: float | None = None,
    turn_rewards: float | None = None,
    prompt: Any = None,
    tools: Sequence[Json] = (),
) -> pb.SampleText:
    """Return the texts of a sample. `prompt` is the one that the model read, where it is not that of the data set."""
    text = pb.SampleText(
        messages_json=json_text(list(messages)),
        ending=ending,
        detail=clean(detail)[:2000],
        prompt_json="" if prompt is None else json_text(prompt),
        tools_json=json_text(list(tools)) if tools else "",
    )
    if reward is not None:
        text.reward = reward
    if turn_rewards is not None:
        text.turn_rewards = turn_rewards
    return text
