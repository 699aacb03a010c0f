"""Text of an evaluation for TensorBoard: the first prompts with their completions and rewards, as Markdown."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence

import numpy as np

from paceline.errors import PacelineError
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.text_limits import cut
from paceline.wire import decode_result, decode_rewards

PROMPTS = 3
"""Prompts that are shown."""

MAX_BYTES = 2000
"""Bytes of a prompt or a completion that are shown."""


def evaluation_text(ledger: Ledger, run_id: str, kind: str, functions: Sequence[str]) -> str:
    """Return the first scored groups of an evaluation's class as text; empty if none is kept or can be read."""
    rows = [row for row in ledger.group_queries.of_class(run_id, kind) if row["state"] == State.SCORED]
    try:
        texts = [_group_text(ledger, run_id, row, functions) for row in rows[:PROMPTS]]
    except PacelineError:  # a damaged record is the concern of those that need it
        return ""
    return "\n\n---\n\n".join(texts)


def _group_text(ledger: Ledger, run_id: str, row: sqlite3.Row, functions: Sequence[str]) -> str:
    payload = ledger.payload(run_id, row["group_id"])
    if payload is None:
        return ""
    texts, arrays = payload.read()
    _, completions = decode_result(arrays, texts)
    rewards_CF = decode_rewards(np.frombuffer(row["rewards"], "<f4").tolist(), len(completions))
    prompt = json.loads(ledger.group_queries.prompt(run_id, row["group_id"]) or '""')
    if not isinstance(prompt, str):
        prompt = "\n".join(f"[{message['role']}] {message['content']}" for message in prompt)
    parts = [_quoted(prompt)]
    for completion, rewards_F in zip(completions, rewards_CF.tolist(), strict=True):
        values = ", ".join(f"{name} {value:.3g}" for name, value in zip(functions, rewards_F, strict=True))
        parts.append(f"**{values}** ({len(completion.token_ids)} tokens)\n\n{_quoted(completion.text)}")
    return "\n\n".join(parts)


def _quoted(text: str) -> str:
    """Return a text as a Markdown block that shows every character."""
    return "\n".join(f"    {line}" for line in cut(text, MAX_BYTES).splitlines() or [""])
