"""Answers RecordsService.ListSamples: pages of groups, each with its completions that pass the filters. A call reads a
bounded number of groups, in the order of an index, and decodes a bounded number of bytes, so a search for a rare
text takes many short calls. The samples of a group with an environment have conversations, turns, and rows with
their masks."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.advantages import group_totals
from paceline.array_frames import Buffer
from paceline.errors import InvalidInput, NotFound, WireError
from paceline.groups import Completion, Rows
from paceline.services.common.worker.score_extras import EXTRA_NAME, read_extra
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.ledger.segments import DamagedRecord
from paceline.services.coordinator.records import page_tokens
from paceline.spec import RewardFunctionSection, RunSpec
from paceline.v1 import exchange_pb2
from paceline.v1 import records_pb2 as pb
from paceline.wire import CompletionArrays, decode_result, decode_rewards, parse_message, split_rows

GROUPS = 64
"""Largest number of groups that a call reads."""

MAX_BYTES = 4 << 20
"""Largest number of bytes that a call decodes, and of its answer. A group that exceeds a limit is the last one."""

MAX_EXTRA_BYTES = 16 << 20
"""Size, in bytes, of the largest extra.jsonl that a bounded call reads, because each page reads the whole file."""

MAX_PROMPT, MAX_TEXT = 4000, 2000
MAX_MESSAGES = 100
MAX_VERSIONS = 20
"""Largest number of evaluations that a message names."""
STATES = tuple(state.value for state in State)


def list_samples(
    ledger: Ledger, request: pb.ListSamplesRequest, spec: RunSpec, *, is_bounded: bool = True
) -> pb.ListSamplesResponse:
    """Return a page of samples of a run with this spec. Raises NotFound, InvalidInput, LedgerFault."""
    if not spec.samples:
        raise NotFound(
            f"run {request.run_id} has no samples: with algorithm {spec.algorithm} it trains on its data set's rows"
        )
    rows, has_more = _rows(ledger, request)
    filters = CompletionFilter(request)
    extra = _extra(ledger, request, rows, is_bounded=is_bounded)
    version = _evaluated_version(ledger, request)
    response, size = pb.ListSamplesResponse(), 0
    for number, row in enumerate(rows, 1):
        content, stored_bytes = _content(ledger, request.run_id, row, spec, extra, version)
        size += stored_bytes
        response.examined = number
        _add(response, row, content, filters, version, full=request.full)
        if size > MAX_BYTES:
            has_more = has_more or number < len(rows)
            rows = rows[:number]
            break
    if has_more and rows:
        response.next_page_token = _token(request, rows[-1])
    return response


def _rows(ledger: Ledger, request: pb.ListSamplesRequest) -> tuple[list[sqlite3.Row], bool]:
    size = page_tokens.page_size(request.page_size, GROUPS)
    columns = "SELECT groups.*, prompt_json, columns_json FROM groups"
    prompts = "LEFT JOIN prompts USING (run_id, group_id)"
    sign, order = ("<", "DESC") if request.newest_first else (">", "ASC")
    values: tuple[Any, ...]
    if request.HasField("group_id"):
        query, values = (
            f"{columns} {prompts} WHERE run_id = ? AND group_id = ?",
            (request.run_id, min(request.group_id, page_tokens.LARGEST)),
        )
        found = ledger.rows(query, values)
        if not found:
            raise NotFound(f"run {request.run_id} has no group {request.group_id}")
        return found, False
    if request.state or _is_evaluation(request):
        kind, state = _class_and_state(ledger, request)
        key = page_tokens.read(request.page_token, 2) or _end(request, 2)
        query = (
            f"{columns} INDEXED BY groups_by_state {prompts} WHERE run_id = ? AND class = ? AND state = ?"
            f" AND (slot, group_id) {sign} (?, ?) ORDER BY slot {order}, group_id {order} LIMIT ?"
        )
        values = (request.run_id, kind, state, *key, size + 1)
    else:
        key = page_tokens.read(request.page_token, 2) or _end(request, 2)
        first = request.from_step if request.HasField("from_step") else 0
        last = request.to_step if request.HasField("to_step") else page_tokens.LARGEST
        query = (
            f"{columns} INDEXED BY step_groups {prompts} WHERE run_id = ? AND step IS NOT NULL AND step BETWEEN ? AND ?"
            f" AND (step, rank_order) {sign} (?, ?) ORDER BY step {order}, rank_order {order} LIMIT ?"
        )
        bounds = (min(first, page_tokens.LARGEST), min(last, page_tokens.LARGEST))
        values = (request.run_id, *bounds, *key, size + 1)
    found = ledger.rows(query, values)
    if not found and _is_evaluation(request) and not (request.state or request.page_token):
        raise _not_kept(ledger, request)
    return found[:size], len(found) > size


def _end(request: pb.ListSamplesRequest, length: int) -> tuple[int, ...]:
    return (page_tokens.LARGEST if request.newest_first else -1,) * length


def _token(request: pb.ListSamplesRequest, row: sqlite3.Row) -> str:
    by_slot = request.state or _is_evaluation(request)
    key = (row["slot"], row["group_id"]) if by_slot else (row["step"], row["rank_order"])
    return page_tokens.write(*key)


def _is_evaluation(request: pb.ListSamplesRequest) -> bool:
    return request.newest_evaluation or request.HasField("evaluated_version")


def _class_and_state(ledger: Ledger, request: pb.ListSamplesRequest) -> tuple[str, str]:
    if request.state and request.state not in STATES:
        raise InvalidInput(f"state is {request.state[:40]!r}, but must be one of {', '.join(STATES)}")
    if not _is_evaluation(request):
        return "train", request.state
    return f"eval:{_evaluation(ledger, request)['step']}", request.state or State.SCORED.value


def _not_kept(ledger: Ledger, request: pb.ListSamplesRequest) -> NotFound:
    kept = ledger.rows(
        "SELECT pinned_step FROM evaluations WHERE run_id = ? AND done = 1 AND pinned_step IS NOT NULL AND EXISTS (SELECT 1"
        " FROM groups WHERE groups.run_id = evaluations.run_id AND class = 'eval:' || evaluations.step AND state = 'scored')"
        " ORDER BY step",
        (request.run_id,),
    )
    versions = ", ".join(str(version) for (version,) in kept[-MAX_VERSIONS:]) or "none"
    return NotFound(
        f"the samples of version {_evaluation(ledger, request)['pinned_step']} were not kept (logger.keep_evaluations); kept "
        f"versions: {versions}"
    )


def _evaluation(ledger: Ledger, request: pb.ListSamplesRequest) -> sqlite3.Row:
    evaluations = ledger.rows(
        "SELECT step, pinned_step FROM evaluations WHERE run_id = ? AND done = 1 AND pinned_step IS NOT NULL"
        " ORDER BY step",
        (request.run_id,),
    )
    is_any = not request.HasField("evaluated_version")
    matching: list[sqlite3.Row] = [
        row for row in evaluations if is_any or row["pinned_step"] == request.evaluated_version
    ]
    if not matching:
        versions = ", ".join(str(row["pinned_step"]) for row in evaluations[-MAX_VERSIONS:]) or "none yet"
        raise NotFound(
            f"run {request.run_id} has no evaluation{'' if is_any else f' of version {request.evaluated_version}'}; "
            f"evaluated versions: {versions}"
        )
    return matching[-1]


def _evaluated_version(ledger: Ledger, request: pb.ListSamplesRequest) -> int | None:
    """Return the version of the requested evaluation; None if no evaluation is requested."""
    if request.HasField("group_id") or not _is_evaluation(request):
        return None
    return int(_evaluation(ledger, request)["pinned_step"])


def _extra(
    ledger: Ledger, request: pb.ListSamplesRequest, rows: Sequence[sqlite3.Row], *, is_bounded: bool
) -> dict[str, dict[str, list[Any]]]:
    folder = ledger.run_directory(request.run_id)
    try:
        is_read = not is_bounded or (folder / EXTRA_NAME).stat().st_size <= MAX_EXTRA_BYTES
    except OSError:
        return {}
    return read_extra(folder, {row["digest"] for row in rows}) if request.full and is_read else {}


def _content(
    ledger: Ledger,
    run_id: str,
    row: sqlite3.Row,
    spec: RunSpec,
    extra: dict[str, dict[str, list[Any]]],
    version: int | None,
) -> tuple[dict[str, Any] | None, int]:
    """Return a group's content and its stored bytes; None if its completions or scores are missing or incomplete."""
    if row["rewards"] is None or row["prompt_json"] is None:
        return None, 0
    try:
        payload = ledger.payload(run_id, row["group_id"])
        if payload is None:
            return None, 0
        texts, arrays = payload.read()
        step = row["step"] if version is None else version
        content = _group_content(row, arrays, texts, spec.rewards, step or 0, extra.get(row["digest"], {}))
    except (DamagedRecord, WireError):  # `verify` reports it; the other groups can be read
        return None, 0
    if version is not None:
        content["step"] = version
    if spec.environment.is_used:
        content["restarts"] = ended_lives(ledger, run_id, row["group_id"])
    return content, len(texts) + len(arrays)


def _group_content(
    row: sqlite3.Row,
    arrays: Buffer,
    texts: Buffer,
    rewards: Sequence[RewardFunctionSection],
    step: int,
    extra: dict[str, list[Any]],
) -> dict[str, Any]:
    """Return what `paceline samples --json` prints of a group: prompt, columns, and for each completion its text,
    tokens, versions, samplers, rewards by function (null if a function returned None), their sum with the weights of
    `step`, and the columns that the functions logged (`extra`). Raises WireError."""
    prompt_ids, completions = decode_result(arrays, texts)
    sampled = episodes(arrays, texts)
    if sampled is None:
        sampled = [
            {
                "text": completion.text,
                "token_ids": completion.token_ids.tolist(),
                "logprobs": completion.logprobs.tolist(),
                "finish_reason": completion.finish_reason,
                "spans": [[s.start, s.end, s.session, s.step] for s in completion.spans],
                "samplers": [s.sampler for s in completion.spans],
            }
            for completion in completions
        ]
    functions = json.loads(row["functions"])
    rewards_CF = decode_rewards(np.frombuffer(row["rewards"], "<f4").tolist(), len(sampled))
    totals_C = group_totals(rewards_CF, rewards, step)
    return {
        "group_id": row["group_id"],
        "step": row["step"],
        "state": row["state"],
        "attempt": row["attempt"],
        "prompt": json.loads(row["prompt_json"]),
        "columns": json.loads(row["columns_json"]),
        "prompt_ids": prompt_ids.tolist(),
        "reward": row["reward"],
        "completions": [
            sample
            | {
                "rewards": {
                    name: None if np.isnan(value) else float(value)
                    for name, value in zip(functions, rewards_F, strict=True)
                },
                "reward": None if np.isnan(totals_C[index]) else float(totals_C[index]),
                "extra": {name: values[index] for name, values in extra.items() if len(values) == len(sampled)},
            }
            for index, (sample, rewards_F) in enumerate(zip(sampled, rewards_CF, strict=True))
        ],
    }


def _add(
    response: pb.ListSamplesResponse,
    row: sqlite3.Row,
    content: dict[str, Any] | None,
    filters: CompletionFilter,
    version: int | None,
    *,
    full: bool,
) -> None:
    prompt = row["prompt_json"] or '""'
    step = row["step"] if version is None else version
    completions = content["completions"] if content is not None else []
    passed = [index for index, each in enumerate(completions) if filters.passes(each, prompt, step)]
    if not passed and (completions or not filters.is_empty):
        return
    group = response.groups.add(
        group_id=row["group_id"],
        state=row["state"],
        reason=row["reason"] or "",
        attempt=row["attempt"],
        prompt_json=prompt if full else _cut(prompt),
        num_completions=len(completions),
        json=json.dumps(content) if full and content is not None else "",
    )
    if step is not None:
        group.step = step
    if row["reward"] is not None:
        group.reward = row["reward"]
    rewards = [each["reward"] for each in completions if each["reward"] is not None]
    for index in passed:
        _add_completion(group, index, completions[index], step, rewards, full=full)


def _cut(prompt_json: str) -> str:
    if len(prompt_json) <= MAX_PROMPT:
        return prompt_json
    prompt = json.loads(prompt_json)
    if isinstance(prompt, str):
        return json.dumps(prompt[:MAX_PROMPT])
    share = MAX_PROMPT // max(1, len(prompt))
    kept = [{"role": message.get("role"), "content": str(message.get("content") or "")[:share]} for message in prompt]
    return json.dumps(kept[:MAX_MESSAGES])


def _add_completion(
    group: pb.SampleGroup,
    index: int,
    content: dict[str, Any],
    step: int | None,
    rewards: Sequence[float],
    *,
    full: bool,
) -> None:
    versions = sorted({span[3] for span in content["spans"]})
    completion = group.completions.add(
        index=index,
        text=content["text"] if full else content["text"][:MAX_TEXT],
        rewards={name: value for name, value in content["rewards"].items() if value is not None},
        num_tokens=total_tokens(content),
        age=0 if step is None or not versions else step - versions[0],
        versions=versions,
        finish_reason=content["finish_reason"],
    )
    if content["reward"] is not None:
        completion.reward = content["reward"]
        completion.above_mean = content["reward"] - sum(rewards) / len(rewards)


OPTIONAL = ("min_reward", "max_reward", "min_tokens", "max_tokens", "min_age", "max_age")


class CompletionFilter:
    def __init__(self, request: pb.ListSamplesRequest):
        self._bounds = {name: getattr(request, name) for name in OPTIONAL if request.HasField(name)}  # type: ignore[arg-type]
        self._finish_reason = request.finish_reason
        self._text = request.text.casefold()

    @property
    def is_empty(self) -> bool:
        return not (self._bounds or self._finish_reason or self._text)

    def passes(self, completion: dict[str, Any], prompt_json: str, step: int | None) -> bool:
        """Return whether a completion passes; `step` is that of its batch. A completion without a reward passes no
        bound on rewards, and one without a step no bound on ages."""
        if self.is_empty:
            return True
        oldest = min((span[3] for span in completion["spans"]), default=None)
        age = None if step is None or oldest is None else step - oldest
        return (
            self._is_within("reward", completion["reward"])
            and self._is_within("tokens", total_tokens(completion))
            and self._is_within("age", age)
            and self._finish_reason in ("", completion["finish_reason"])
            and (not self._text or self._has_text(completion, prompt_json))
        )

    def _is_within(self, name: str, value: float | None) -> bool:
        least, greatest = self._bounds.get(f"min_{name}"), self._bounds.get(f"max_{name}")
        if least is None and greatest is None:
            return True
        if value is None:
            return False
        return (least is None or value >= least) and (greatest is None or value <= greatest)

    def _has_text(self, completion: dict[str, Any], prompt_json: str) -> bool:
        if self._text in completion["text"].casefold():
            return True
        prompt = json.loads(prompt_json)
        texts = [prompt] if isinstance(prompt, str) else [str(m.get("content", "")) for m in prompt]
        return any(self._text in text.casefold() for text in texts)


def total_tokens(completion: dict[str, Any]) -> int:
    return len(completion["token_ids"])


def episodes(arrays: Buffer, texts: Buffer) -> list[dict[str, Any]] | None:
    """Return the content of each sample of a group; None for a group without an environment. Raises WireError.
    `token_ids`, `logprobs`, `spans` and the `samplers` of spans are those that the model sampled, in all rows of the
    sample, so that exports read an episode as a completion. `rows` has every token that the model read: `sampled` is
    the mask, 1 for sampled tokens. `turns` are in the order of rows: row, start, end, reward (null for none)."""
    _, rows = decode_result(arrays, texts)
    owners = split_rows(CompletionArrays.of(arrays), rows)
    if owners is None:
        return None
    samples = parse_message(exchange_pb2.Texts, texts).samples
    return [_episode(index, rows, owners, text) for index, text in enumerate(samples)]


def ended_lives(ledger: Ledger, run_id: str, group_id: int) -> list[dict[str, Any]]:
    """Return the lives of a group's samples that were not trained or only in part: sample, life, reason, error, and the
    turns and tokens that were dropped."""
    names = ("sample", "life", "reason", "error", "turns", "tokens")
    return [{name: row[name] for name in names} for row in ledger.episodes.ended(run_id, group_id)]


def _episode(index: int, rows: tuple[Completion, ...], owners: Rows, text: exchange_pb2.SampleText) -> dict[str, Any]:
    numbers = [number for number, sample in enumerate(owners.samples) if sample == index]
    first = numbers[0] if numbers else 0
    messages = json.loads(text.messages_json or "[]")
    sampled = [_sampled(rows[number]) for number in numbers]
    spans, offset = [], 0
    for completion in sampled:
        spans += [[offset + s.start, offset + s.end, s.session, s.step] for s in completion.spans]
        offset += len(completion.token_ids)
    return {
        "text": _last_text(messages),
        "token_ids": [token for completion in sampled for token in completion.token_ids.tolist()],
        "logprobs": [value for completion in sampled for value in completion.logprobs.tolist()],
        "finish_reason": rows[numbers[-1]].finish_reason if numbers else "",
        "spans": spans,
        "samplers": [s.sampler for completion in sampled for s in completion.spans],
        "messages": messages,
        "prompt": json.loads(text.prompt_json) if text.prompt_json else None,
        "tools": json.loads(text.tools_json) if text.tools_json else [],
        "ending": text.ending,
        "detail": text.detail,
        "rows": [_sample_row(rows[number]) for number in numbers],
        "turns": [
            [turn.row - first, turn.start, turn.end, None if math.isnan(turn.reward) else turn.reward]
            for turn in owners.turns
            if owners.samples[turn.row] == index
        ],
    }


def _sampled(row: Completion) -> Completion:
    """Return the sampled tokens of a row, as a completion without gaps."""
    if row.sampled_T is None:
        return row
    spans, position = [], 0
    for span in row.spans:
        spans.append(span._replace(start=position, end=position + span.end - span.start))
        position += span.end - span.start
    return Completion(row.token_ids[row.sampled_T], row.logprobs[row.sampled_T], tuple(spans), row.finish_reason)


def _sample_row(row: Completion) -> dict[str, Any]:
    sampled = [True] * len(row.token_ids) if row.sampled_T is None else row.sampled_T.tolist()
    return {
        "prompt_ids": [] if row.prompt_ids is None else row.prompt_ids.tolist(),
        "token_ids": row.token_ids.tolist(),
        "sampled": [int(value) for value in sampled],
        "text": row.text,
    }


def _last_text(messages: list[Any]) -> str:
    for message in reversed(messages):
        if isinstance(message, dict) and message.get("role") == "assistant":
            return str(message.get("content") or "")
    return ""
