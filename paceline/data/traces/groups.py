"""Groups of traces by prompt, which `offline_grpo` trains on.

Promise: a group has at least two traces of different rewards, and each trace that is left out is counted by its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.data.joined_rows import Part, counted
from paceline.data.traces.rows import Trace, TraceKeys, format_of, prompt_digest, read_trace
from paceline.errors import DataError


class TraceGroups:
    """Rows of traces as rows of groups: `{"traces": [row, …]}`. Memory holds numbers alone.

    Own exports that name a group stay in it; all other traces belong to the group of their prompt.
    """

    columns: tuple[str, ...] = ("traces",)

    def __init__(
        self, rows: Part, keys: TraceKeys, *, least_reward: float | None = None, max_size: int = 64
    ) -> None:
        """Group `rows`. Traces below `least_reward` are left out; a prompt of more than `max_size` traces is several groups.

        Raises DataError: no group is left.
        """
        self._rows, self.fingerprint = rows, rows.fingerprint
        self.left_out: Counter[str] = Counter()
        """Traces that are in no group, by reason."""
        self.formats: Counter[str] = Counter()
        """Traces in groups, by format."""
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
                f"the {len(rows)} traces have no prompt with two different rewards ({counted(self.left_out)}), so there is "
                "nothing to compare; add traces of the same prompts"
            )

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return group `index`. Raises Unreadable as the rows do."""
        return {"traces": [self._rows[row] for row in self._groups[index]]}

    @property
    def report(self) -> str:
        """Return a sentence on the groups, the behaviour policy and what was left out."""
        used = sum(map(len, self._groups))
        policies = [
            f"{number:,} have the recorded behaviour policy"
            if name == "own export"
            else f"{number:,} ({name} rows) take the starting policy as behaviour policy"
            for name, number in sorted(self.formats.items())
        ]
        left = f"; left out: {counted(self.left_out)}" if self.left_out else ""
        return f"{len(self):,} groups of {used:,} traces, of which {', '.join(policies)}{left}"

    def _add(self, traces: Sequence[tuple[int, float]], formats: Mapping[int, str]) -> None:
        if len(traces) == 1:
            self.left_out["only trace of its prompt"] += 1
        elif len({reward for _, reward in traces}) == 1:
            self.left_out["all traces of the prompt have one reward"] += len(traces)
        else:
            self._groups.append([index for index, _ in traces])
            self.formats.update(formats[index] for index, _ in traces)


def _group_key(row: Mapping[str, Any], trace: Trace) -> bytes:
    group = row.get("group_id") if trace.tokens is not None else None
    return prompt_digest(trace.prompt) + (b"" if group is None else str(group).encode())
