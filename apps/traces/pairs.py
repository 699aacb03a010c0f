"""Preference pairs from traces: per prompt each good completion with each bad one.

Promise: prompts are split into training and held-out ones before pairing, by a hash of the prompt, so that no prompt is in
both; every trace is counted as used or by the reason for which it was left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from paceline.data.joined_rows import Part
from paceline.data.traces.rows import Trace, TraceKeys, prompt_digest, read_trace


@dataclass(frozen=True)
class PairRules:
    """The choice of pairs."""

    chosen: float = 0.7
    """Least reward of a chosen completion."""
    rejected: float = 0.5
    """A rejected completion has a reward below this."""
    max_pairs_per_prompt: int | None = None
    held_out: float = 0.0
    """Share of the prompts whose pairs are held out."""


@dataclass
class PairReport:
    """Counts of what was used and left out."""

    traces: int = 0
    traces_used: int = 0
    prompts: int = 0
    prompts_used: int = 0
    pairs: int = 0
    pairs_held_out: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Traces by reason."""
    pairs_left_out: Counter[str] = field(default_factory=Counter)
    """Pairs by reason."""

    def facts(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {**vars(self), "left_out": dict(self.left_out), "pairs_left_out": dict(self.pairs_left_out)}


def pairs_of_traces(
    rows: Part, keys: TraceKeys, rules: PairRules, report: PairReport
) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield each pair as a row (prompt, chosen, rejected, margin and both rewards), and whether it is held out.

    Pairs are in the order of their prompts' first traces. Of more than `max_pairs_per_prompt` pairs those of the largest
    margin stay. Raises DataError for a row that is no trace. Memory holds the prompts' digests and the rewards.
    """
    members: dict[bytes, list[tuple[int, float]]] = {}
    for index in range(len(rows)):
        trace = read_trace(rows[index], keys)
        report.traces += 1
        indices = members.setdefault(prompt_digest(trace.prompt), [])
        if trace.reward is None:
            report.left_out["no reward"] += 1
        elif rules.rejected <= trace.reward < rules.chosen:
            report.left_out[f"reward from {rules.rejected:g} to below {rules.chosen:g}"] += 1
        else:
            indices.append((index, trace.reward))
    report.prompts = len(members)
    for digest, indices in members.items():
        good = [(index, reward) for index, reward in indices if reward >= rules.chosen]
        bad = [(index, reward) for index, reward in indices if reward < rules.rejected]
        if not good or not bad:
            report.left_out["prompt with one class only"] += len(indices)
            continue
        held_out = int.from_bytes(digest[:8], "big") / 2**64 < rules.held_out
        pairs = sorted(
            ((best, worst) for best in good for worst in bad), key=lambda pair: pair[1][1] - pair[0][1]
        )  # stable, so equal margins stay in the order of the file
        chosen, used = _different(rows, keys, pairs, rules, report), set()
        for won, lost, row in chosen:
            used |= {won, lost}
            report.pairs += 1
            report.pairs_held_out += held_out
            yield row, held_out
        report.prompts_used += bool(used)
        report.traces_used += len(used)
        if rest := len(indices) - len(used):
            report.left_out["in no pair that was kept"] += rest


def _different(
    rows: Part,
    keys: TraceKeys,
    pairs: list[tuple[tuple[int, float], tuple[int, float]]],
    rules: PairRules,
    report: PairReport,
) -> list[tuple[int, int, dict[str, Any]]]:
    """Return the pairs of one prompt with its indices and its row; none of two equal completions."""
    kept: list[tuple[int, int, dict[str, Any]]] = []
    for (won, high), (lost, low) in pairs:
        if rules.max_pairs_per_prompt is not None and len(kept) >= rules.max_pairs_per_prompt:
            report.pairs_left_out["beyond max_pairs_per_prompt"] += 1
            continue
        better, worse = (read_trace(rows[index], keys) for index in (won, lost))
        if better.completion == worse.completion:
            report.pairs_left_out["equal completions"] += 1
        else:
            kept.append((won, lost, _row(better, worse, high, low)))
    return kept


def _row(better: Trace, worse: Trace, high: float, low: float) -> dict[str, Any]:
    def completion(trace: Trace) -> Any:
        is_chat = not isinstance(trace.prompt, str) and isinstance(trace.completion, str)
        return [{"role": "assistant", "content": trace.completion}] if is_chat else trace.completion

    return {
        "prompt": better.prompt,
        "chosen": completion(better),
        "rejected": completion(worse),
        "margin": high - low,
        "chosen_reward": high,
        "rejected_reward": low,
        **({"tools": better.tools} if better.tools else {}),
    }
