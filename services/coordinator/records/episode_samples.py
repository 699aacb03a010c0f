"""Samples of a group with an environment, for people and exports: conversations, turns, and rows with their masks."""

from __future__ import annotations

import json
import math
from typing import Any

from paceline.array_frames import Buffer
from paceline.groups import Completion, Rows
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import CompletionArrays, decode_result, parse_message, split_rows


def episodes(arrays: Buffer, texts: Buffer) -> list[dict[str, Any]] | None:
    """Return what each sample of a group was; None for a group without an environment. Raises WireError.

    `token_ids`, `logprobs` and `spans` are those that the model sampled, of all rows of the sample, so that exports read an
    episode as a completion. `rows` has every token that the model read: `sampled` is the mask, 1 for sampled tokens.
    `turns` are in the order of rows: row, start, end, reward (null for none).
    """
    _, rows = decode_result(arrays, texts)
    owners = split_rows(CompletionArrays.of(arrays), rows)
    if owners is None:
        return None
    samples = parse_message(pb.Texts, texts).samples
    return [_episode(index, rows, owners, text) for index, text in enumerate(samples)]


def ended_lives(ledger: Ledger, run_id: str, group_id: int) -> list[dict[str, Any]]:
    """Return the lives of a group's samples that were not trained, whole or in part: sample, life, reason, error, and the turns
    and tokens that were dropped.
    """
    names = ("sample", "life", "reason", "error", "turns", "tokens")
    return [{name: row[name] for name in names} for row in ledger.episodes.ended(run_id, group_id)]


def _episode(index: int, rows: tuple[Completion, ...], owners: Rows, text: pb.SampleText) -> dict[str, Any]:
    own = [number for number, sample in enumerate(owners.samples) if sample == index]
    first = own[0] if own else 0
    messages = json.loads(text.messages_json or "[]")
    sampled = [_sampled(rows[number]) for number in own]
    spans, offset = [], 0
    for completion in sampled:
        spans += [[offset + s.start, offset + s.end, s.session, s.step] for s in completion.spans]
        offset += len(completion.token_ids)
    return {
        "text": _last_text(messages),
        "token_ids": [token for completion in sampled for token in completion.token_ids.tolist()],
        "logprobs": [value for completion in sampled for value in completion.logprobs.tolist()],
        "finish_reason": rows[own[-1]].finish_reason if own else "",
        "spans": spans,
        "messages": messages,
        "prompt": json.loads(text.prompt_json) if text.prompt_json else None,
        "tools": json.loads(text.tools_json) if text.tools_json else [],
        "ending": text.ending,
        "detail": text.detail,
        "rows": [_row(rows[number]) for number in own],
        "turns": [
            [turn.row - first, turn.start, turn.end, None if math.isnan(turn.reward) else turn.reward]
            for turn in owners.turns
            if owners.samples[turn.row] == index
        ],
    }


def _sampled(row: Completion) -> Completion:
    """Return the tokens of a row that the model sampled, as a completion without gaps."""
    if row.sampled_T is None:
        return row
    spans, position = [], 0
    for span in row.spans:
        spans.append(span._replace(start=position, end=position + span.end - span.start))
        position += span.end - span.start
    return Completion(
        row.token_ids[row.sampled_T], row.logprobs[row.sampled_T], tuple(spans), row.finish_reason
    )


def _row(row: Completion) -> dict[str, Any]:
    sampled = [True] * len(row.token_ids) if row.sampled_T is None else row.sampled_T.tolist()
    return {
        "prompt_ids": [] if row.prompt_ids is None else row.prompt_ids.tolist(),
        "token_ids": row.token_ids.tolist(),
        "sampled": [int(value) for value in sampled],
        "text": row.text,
    }


def _last_text(messages: list[Any]) -> str:
    """Return the text of the model's last message."""
    for message in reversed(messages):
        if isinstance(message, dict) and message.get("role") == "assistant":
            return str(message.get("content") or "")
    return ""
