"""Reads a coordinator's records (metrics, events, samples, token accounting, specs, logs) as plain Python values.
`Client.records` reads them over the wire, with only the coordinator's address and token. Metrics and samples are
columns: a dictionary of lists of equal length, as `pandas.DataFrame` and `polars.DataFrame` take it. Methods follow
the pages of an answer to the end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import NotFound

if TYPE_CHECKING:
    from paceline.v1.records_pb2 import (
        GetBooksResponse,
        GetGroupLifeResponse,
        MemberGauges,
        RecordedBatch,
        RecordedCheckpoint,
        SampleGroup,
        SpecDifference,
        SpecKey,
        TokenNumbers,
    )

Columns = dict[str, list[Any]]
Call = Callable[[str, Any], Any]
"""Takes the name of a method of RecordsService and its request; returns the response. Raises PacelineError."""


class Verified(NamedTuple):
    """Result of comparing all records of a run."""

    problems: list[str]
    """One line for each disagreement; empty when all records agree."""
    facts: dict[str, Any]


class RecordedEvent(NamedTuple):
    """An event of a run: the fields of `paceline.client.Event`, and its step."""

    sequence: int
    kind: str
    content: dict[str, Any]
    at_step: int
    """Step at which the event happened."""


class Records:
    """Records of a coordinator, or of a ledger that this process reads; `call` sends the requests."""

    def __init__(self, call: Call):
        self._call = call

    # Metrics and events

    def metrics(self, run_id: str, kind: str = "step") -> Columns:
        """Return every metric of every step (or of each `evaluation`) as columns; None if a step has no value. `step`
        is the first column. Raises NotFound."""
        rows = [event.content for event in self.events(run_id, kinds=[kind])]
        names = dict.fromkeys(["step", *(n for row in rows for n, v in row.items() if isinstance(v, int | float))])
        return {name: [_number(row.get(name)) for row in rows] for name in names}

    def series(
        self,
        run_id: str,
        names: Sequence[str],
        *,
        kind: str = "step",
        from_step: int = 0,
        to_step: int = 0,
        max_points: int = 0,
    ) -> Columns:
        """Return metrics by name (`*` matches any characters), averaged to at most `max_points`, as columns: `step`
        (the first of a point), `time` and one for each metric. Raises NotFound, InvalidInput."""
        window = {"from_step": from_step, "to_step": to_step, "max_points": max_points}
        columns: Columns = {"step": [], "time": []}
        for page in self._pages("GetMetrics", run_id=run_id, names=names, kind=kind, **window):
            before = len(columns["step"])
            columns["step"] += page.steps
            columns["time"] += map(_known, page.times)
            for series in page.series:
                column = columns.setdefault(series.name, [])
                column += [None] * (before - len(column)) + [_known(value) for value in series.values]
        for column in columns.values():
            column += [None] * (len(columns["step"]) - len(column))
        return columns

    def metric_names(self, run_id: str, kind: str = "step") -> list[str]:
        """Return the names of a run's metrics. Raises NotFound."""
        return list(self._ask("GetMetrics", run_id=run_id, kind=kind).names)

    def events(self, run_id: str, *, kinds: Sequence[str] = (), after: int = 0) -> Iterator[RecordedEvent]:
        """Yield the events of a run until now, oldest first, of some kinds or all. Raises NotFound."""
        while True:
            page = self._ask("ListEvents", run_id=run_id, kinds=kinds, after=after)
            for event in page.events:
                yield RecordedEvent(event.sequence, event.kind, json.loads(event.json), event.at_step)
            after = page.next_after
            if not page.more:
                return

    # Samples

    def samples(self, run_id: str, step: int | None = None, *, limit: int = 0, **filters: Any) -> Columns:
        """Return completions as columns: group_id, completion_index, step, state, prompt, completion, finish_reason,
        num_tokens, age, versions, final_reward, and `reward/<function>`. `filters` are fields of ListSamplesRequest:
        from_step, to_step, group_id, state, evaluated_version, newest_evaluation, min_reward, max_reward,
        min_tokens, max_tokens, min_age, max_age, finish_reason, text, newest_first. `limit` is the largest number of
        completions; 0 is all. Raises NotFound, InvalidInput."""
        if step is not None:
            filters |= {"from_step": step, "to_step": step}
        rows: list[dict[str, Any]] = []
        for group in self.sample_groups(run_id, full=True, **filters):
            content = json.loads(group.json) if group.json else {}
            prompt = content.get("prompt", json.loads(group.prompt_json))
            for completion in group.completions:
                rows.append(
                    {
                        "group_id": group.group_id,
                        "completion_index": completion.index,
                        "step": group.step if group.HasField("step") else None,
                        "state": group.state,
                        "prompt": prompt,
                        "completion": completion.text,
                        "finish_reason": completion.finish_reason,
                        "num_tokens": completion.num_tokens,
                        "age": completion.age,
                        "versions": list(completion.versions),
                        "final_reward": completion.reward if completion.HasField("reward") else None,
                        **{f"reward/{name}": value for name, value in completion.rewards.items()},
                    }
                )
            if limit and len(rows) >= limit:
                rows = rows[:limit]
                break
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}

    def groups(self, run_id: str, step: int | None = None, **filters: Any) -> Iterator[dict[str, Any]]:
        """Yield groups with stored completions as `paceline samples --json` prints them: prompt, columns, and for each
        completion its text, token ids, log-probabilities, versions and rewards. `filters` as in `samples`. Raises
        NotFound for a step without a batch, or without stored samples that pass."""
        is_filtered = bool(filters)
        if step is not None:
            filters |= {"from_step": step, "to_step": step}
        stored = 0
        for group in self.sample_groups(run_id, full=True, **filters):
            if group.json:
                stored += 1
                yield json.loads(group.json)
        if step is not None and not stored:
            none_passes = NotFound(f"no sample of step {step} of run {run_id} passes the filters")
            raise none_passes if is_filtered else missing_samples(self, run_id, step)

    def sample_groups(self, run_id: str, **filters: Any) -> Iterator[SampleGroup]:
        """Yield the messages of groups that pass filters (fields of ListSamplesRequest). Raises NotFound, InvalidInput."""
        for page in self._pages("ListSamples", run_id=run_id, **filters):
            yield from page.groups

    def attempts(self, run_id: str) -> Iterator[tuple[Any, list[float]]]:
        """Yield the prompt of each scored training group, and the total rewards of its completions; NaN for a
        completion that no function scored. Dropped groups are included. Raises NotFound."""
        for page in self._pages("ListAttempts", run_id=run_id):
            for attempt in page.attempts:
                yield json.loads(attempt.prompt_json), list(attempt.rewards)

    def group_life(self, run_id: str, group_id: int) -> GetGroupLifeResponse:
        """Return the history of a group. Raises NotFound."""
        response: GetGroupLifeResponse = self._ask("GetGroupLife", run_id=run_id, group_id=group_id)
        return response

    # Books, batches, checkpoints

    def books(self, run_id: str) -> GetBooksResponse:
        """Return the token accounting of a run. Raises NotFound."""
        response: GetBooksResponse = self._ask("GetBooks", run_id=run_id)
        return response

    def verify(self, run_id: str, *, deep: bool = False) -> Verified:
        """Compare all records of a run, on the coordinator's host; may take minutes. Raises NotFound, Busy."""
        response = self._ask("VerifyRun", run_id=run_id, deep=deep)
        return Verified(list(response.problems), json.loads(response.facts_json))

    def batches(self, run_id: str, from_step: int = 0) -> Iterator[RecordedBatch]:
        """Yield the batches of a run by step. Raises NotFound."""
        for page in self._pages("ListBatches", run_id=run_id, from_step=from_step):
            yield from page.batches

    def newest_trained_step(self, run_id: str) -> int:
        """Return the newest trained step. Raises NotFound if there is none."""
        for page in self._pages("ListBatches", run_id=run_id, newest_first=True, page_size=10):
            for batch in page.batches:
                if batch.trained:
                    return int(batch.step)
        raise NotFound(f"run {run_id} has trained no batch yet")

    def checkpoints(self, run_id: str) -> list[RecordedCheckpoint]:
        """Return the checkpoints of a run, oldest first. Raises NotFound."""
        return list(self._ask("ListCheckpoints", run_id=run_id).checkpoints)

    # Specs, logs, members

    def spec_yaml(self, run_id: str) -> str:
        """Return the resolved spec of a run. Raises NotFound."""
        return str(self._ask("GetSpec", run_id=run_id).spec_yaml)

    def spec(self, run_id: str) -> list[SpecKey]:
        """Return the values of a run's spec, with the differences from the defaults. Raises NotFound."""
        return list(self._ask("GetSpec", run_id=run_id).keys)

    def spec_difference(self, run_id: str, other_run_id: str) -> list[SpecDifference]:
        """Return the keys in which the specs of two runs differ. Raises NotFound."""
        return list(self._ask("CompareSpecs", run_id=run_id, other_run_id=other_run_id).differences)

    def log_names(self) -> list[str]:
        """Return the names of the services' logs; empty unless `paceline up` runs the coordinator."""
        return list(self._ask("ReadLog").names)

    def log_tail(self, name: str, max_bytes: int = 0) -> str:
        """Return the end of a service's log. Raises NotFound."""
        return str(self._ask("ReadLog", name=name, max_bytes=max_bytes).text)

    def gauges(self) -> list[MemberGauges]:
        """Return the current members with the gauges of their newest heartbeats."""
        return list(self._ask("ListGauges").members)

    def gauge_history(
        self, *, from_time: float = 0.0, to_time: float = 0.0, max_points: int = 0, members: Sequence[str] = ()
    ) -> Columns:
        """Return gauges of pools, or of the named `members`, over time as columns: `time` and `<pool>/<gauge>` or
        `<member>/<gauge>`; None without a reading. Raises InvalidInput."""
        window = {"from_time": from_time, "to_time": to_time, "max_points": max_points}
        answer = self._ask("GetGaugeHistory", member_ids=members, **window)
        columns: Columns = {"time": list(answer.times)}
        for series in answer.series:
            columns[f"{series.member_id or series.pool}/{series.name}"] = [_known(v) for v in series.values]
        return columns

    def token_statistics(self, run_id: str, step: int, group_id: int | None = None) -> list[TokenNumbers]:
        """Return the learner's log-probabilities and entropies of the tokens of a few groups of a step
        (`logger.keep_token_stats`); empty if none were kept. Raises NotFound."""
        answer = self._ask("GetTokenStatistics", run_id=run_id, step=step, group_id=group_id)
        return list(answer.completions)

    def _ask(self, method: str, **fields: Any) -> Any:
        return self._call(method, _request(method, fields))

    def _pages(self, method: str, **fields: Any) -> Iterator[Any]:
        request = _request(method, fields)
        while True:
            page = self._call(method, request)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


def missing_samples(records: Records, run_id: str, step: int) -> NotFound:
    """Return why a step lacks samples: no batch, samples that were not kept or are unreadable. Raises NotFound."""
    from paceline.spec.reading import spec_of_run

    steps = [batch.step for batch in records.batches(run_id)]
    if step not in steps:
        batches = f"the run's batches are of steps 0 to {steps[-1]}" if steps else "the run has no batch yet"
        return NotFound(f"step {step} of run {run_id} has no batch; {batches}")
    if spec_of_run(run_id, records.spec_yaml(run_id))[0].logger.keep_samples:
        return NotFound(f"the samples of step {step} cannot be read; `paceline ledger verify {run_id}` says why")
    return NotFound(f"the samples of step {step} were not kept: the run has logger.keep_samples false")


def _request(method: str, fields: dict[str, Any]) -> Any:
    from paceline.v1 import records_pb2

    return getattr(records_pb2, f"{method}Request")(**fields)


def _number(value: Any) -> Any:
    return value if isinstance(value, int | float) else None


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
