"""Reads traces, recorded completions with rewards, and groups them by prompt for `offline_grpo`.

Supported forms:

    own export     prompt_ids, token_ids, logprobs and final_reward, as `paceline traces export` writes them: the behaviour
                   policy is the recorded one
    text           prompt, completion and a reward: the behaviour policy is taken to be the starting policy
    TRL            the Parquet files of its completions: step, prompt, completion, a column for each reward function, and
                   advantage; the reward is the sum over the functions
    verifiers      prompt and completion as messages, reward and example_id, as in its `results.jsonl`

Other forms are converted to such rows first (`paceline.apps.traces.conversion`). Promise: a completion has only the
model's text; one with messages of a tool or a user in between is refused, because they would be trained. A group has at
least two traces with different rewards, and each trace that is left out is counted by its reason.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.data.example_rows import continuing
from paceline.data.messages import plain, tools_of
from paceline.data.row_checks import check_columns, check_prompt, check_text
from paceline.data.rows import Rows, by_reason
from paceline.data.written import as_number
from paceline.errors import DataError, counted
from paceline.groups import FloatArray, IntArray

REWARD_KEY = "final_reward"
TRL_COLUMNS = frozenset({"step", "prompt", "completion", "advantage"})
"""Columns of TRL's completions that are not reward functions."""
VERIFIERS_COLUMNS = frozenset({"example_id", "prompt", "completion", "reward"})
"""Columns of each line of verifiers' `results.jsonl`."""
TOKEN_COLUMNS = ("prompt_ids", "token_ids", "logprobs")


class TraceTokens(NamedTuple):
    """Tokens of a trace, with their log-probabilities under the policy that sampled them."""

    prompt_ids: IntArray
    token_ids: IntArray
    logprobs: FloatArray


class Trace(NamedTuple):
    prompt: Any
    """Text or chat messages."""
    completion: Any
    """Text, or messages that follow the prompt."""
    reward: float | None
    """Reward; None if the row has none, because nothing scored the completion."""
    tokens: TraceTokens | None
    """Recorded tokens; None for a text row."""
    tools: list[Any] | None = None
    """Definitions of tools for the chat template with the prompt of a text row."""
    finish_reason: str | None = None
    """Reason why the completion of a text row ended, if the row has one."""


class TraceKeys(NamedTuple):
    prompt: str = "prompt"
    completion: str = "completion"
    rewards: tuple[str, ...] = ()
    """Columns whose sum is the reward; empty: `final_reward`, TRL's reward functions, or verifiers' `reward`."""


def read_trace(row: Mapping[str, Any], keys: TraceKeys) -> Trace:
    """Return the trace of a row. Raises DataError with the column, the value and a remedy."""
    check_prompt(dict(row), keys.prompt)
    reward = _reward(row, keys)
    tokens = _tokens(row)
    prompt, completion = row[keys.prompt], row.get(keys.completion, "")
    if tokens is None:
        check_columns(dict(row), (keys.completion,))
        check_text(completion, keys.completion)
        _check_authors(completion, keys.completion)
        completion = continuing(prompt, plain(completion))
        continues = not isinstance(prompt, str) and prompt[-1]["role"] == "assistant"
        if not isinstance(prompt, str) and isinstance(completion, str) and not continues:
            completion = [{"role": "assistant", "content": completion}]
    tools, reason = (None, None) if tokens else (tools_of(row), row.get("finish_reason"))
    return Trace(plain(prompt), plain(completion), reward, tokens, tools, reason)


def format_of(row: Mapping[str, Any]) -> str:
    """Return the name of a trace row's format, for people."""
    if all(row.get(name) is not None for name in TOKEN_COLUMNS):
        return "own export"
    if REWARD_KEY in row:
        return "text"
    if row.keys() >= TRL_COLUMNS:
        return "TRL completions"
    return "verifiers" if row.keys() >= VERIFIERS_COLUMNS else "text"


def is_trace(row: Mapping[str, Any], prompt_key: str, completion_key: str) -> bool:
    """Return whether a row has the columns of a trace with a reward under a standard name."""
    if prompt_key not in row or not (completion_key in row or row.keys() >= set(TOKEN_COLUMNS)):
        return False
    return REWARD_KEY in row or row.keys() >= TRL_COLUMNS or row.keys() >= VERIFIERS_COLUMNS


def _check_authors(completion: Any, key: str) -> None:
    """Raise DataError for messages in a completion that are not the assistant's."""
    for index, message in enumerate(completion if isinstance(completion, list) else ()):
        if message["role"] != "assistant":
            raise DataError(
                f"column {key!r} has a message {index} of the {message['role']}, which the model did not write; give a row "
                "to each answer of the assistant, with the messages before it as its prompt, or remove the row"
            )


def prompt_digest(prompt: Any) -> bytes:
    """Return 16 bytes that identify a prompt, text or messages."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _reward(row: Mapping[str, Any], keys: TraceKeys) -> float | None:
    """Return the reward of a row; None if it has none. Raises DataError."""
    names = keys.rewards or _reward_columns(row)
    if not names:
        raise DataError(
            f"no column {REWARD_KEY!r} among {sorted(row)}; name the columns of the reward in offline_grpo.reward_keys"
        )
    total, known = 0.0, False
    for name in names:
        if name not in row:
            raise DataError(f"no column {name!r} among {sorted(row)}; correct offline_grpo.reward_keys")
        value = as_number(row[name])
        if value is None or (isinstance(value, float) and math.isnan(value)):
            continue
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(f"column {name!r} must be a finite number, not {value!r:.80}; correct the row or remove it")
        total, known = total + float(value), True
    return total if known else None


def _reward_columns(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of the reward: for TRL the columns of its reward functions; none if no name is standard."""
    if REWARD_KEY in row:
        return (REWARD_KEY,)
    if not row.keys() >= TRL_COLUMNS:
        return ("reward",) if row.keys() >= VERIFIERS_COLUMNS else ()
    return tuple(name for name, value in row.items() if name not in TRL_COLUMNS and isinstance(value, int | float))


def _tokens(row: Mapping[str, Any]) -> TraceTokens | None:
    """Return the recorded tokens; None for a text row. Raises DataError if they are inconsistent."""
    if any(row.get(name) is None for name in TOKEN_COLUMNS):
        return None
    if row.get("messages") is not None:
        raise DataError(
            "column 'messages' belongs to an episode, whose rows have several prompts; export a run without an environment"
        )
    try:
        prompt_ids, token_ids = (np.asarray(row[name], np.int32) for name in TOKEN_COLUMNS[:2])
        logprobs = np.asarray(row["logprobs"], np.float32)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"columns {', '.join(TOKEN_COLUMNS)} must be lists of numbers ({error}); write the export as JSONL or Parquet"
        ) from None
    if prompt_ids.ndim != 1 or not len(prompt_ids) or token_ids.ndim != 1 or token_ids.shape != logprobs.shape:
        raise DataError(
            f"column 'token_ids' has {token_ids.size} tokens, 'logprobs' has {logprobs.size} values, and the prompt "
            f"has {prompt_ids.size} tokens; each token needs one log-probability and a prompt before it"
        )
    if not np.isfinite(logprobs).all() or (logprobs > 1e-3).any():
        raise DataError(
            "column 'logprobs' has a value that is no log-probability (finite, at most 0); export the run again"
        )
    return TraceTokens(prompt_ids, token_ids, logprobs)


class TraceGroups:
    """Rows of traces as rows of groups: `{"traces": [row, …]}`. Memory holds only numbers. A trace of Paceline's own
    export that names a group belongs to that group, any other trace to the group of its prompt."""

    columns: tuple[str, ...] = ("traces",)

    def __init__(self, rows: Rows, keys: TraceKeys, *, least_reward: float | None = None, max_size: int = 64) -> None:
        """Group `rows`. Traces below `least_reward` are left out; a prompt of over `max_size` traces gets several
        groups. Raises DataError if no group is left."""
        self._rows, self.fingerprint = rows, rows.fingerprint
        self.left_out: Counter[str] = Counter()
        self.formats: Counter[str] = Counter()
        members: dict[bytes, list[tuple[int, float]]] = {}
        formats: dict[int, str] = {}
        for index in range(len(rows)):
            row = rows[index]
            trace = read_trace(row, keys)
            if trace.reward is None:
                self.left_out["no reward"] += 1
            elif least_reward is not None and trace.reward < least_reward:
                self.left_out["reward below min_reward_threshold"] += 1
            else:
                members.setdefault(_group_key(row, trace), []).append((index, trace.reward))
                formats[index] = format_of(row)
        self._groups: list[list[int]] = []
        for traces in members.values():
            for start in range(0, len(traces), max_size):
                self._add(traces[start : start + max_size], formats)
        if not self._groups:
            raise DataError(
                f"the {len(rows)} traces have no prompt with two different rewards ({by_reason(self.left_out)}), so there is "
                "nothing to compare; add traces of the same prompts"
            )

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"traces": [self._rows[row] for row in self._groups[index]]}

    @property
    def report(self) -> str:
        """Return a sentence on the groups, the behaviour policy and the traces that were left out."""
        used = sum(map(len, self._groups))
        policies = [
            f"{number:,} have the recorded behaviour policy"
            if name == "own export"
            else f"{number:,} ({name} rows) take the starting policy as behaviour policy"
            for name, number in sorted(self.formats.items())
        ]
        left = f"; left out: {by_reason(self.left_out)}" if self.left_out else ""
        return f"{counted(len(self), 'group')} of {counted(used, 'trace')}, of which {', '.join(policies)}{left}"

    def _add(self, traces: Sequence[tuple[int, float]], formats: Mapping[int, str]) -> None:
        if len(traces) == 1:
            self.left_out["only trace of its prompt"] += 1
        elif len({reward for _, reward in traces}) == 1:
            self.left_out["all traces of the prompt have the same reward"] += len(traces)
        else:
            self._groups.append([index for index, _ in traces])
            self.formats.update(formats[index] for index, _ in traces)


def _group_key(row: Mapping[str, Any], trace: Trace) -> bytes:
    group = row.get("group_id") if trace.tokens is not None else None
    return prompt_digest(trace.prompt) + (b"" if group is None else str(group).encode())
