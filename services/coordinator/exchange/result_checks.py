"""Checks a result against the ledger, in its transaction: its token ids, the versions and samplers of its tokens, and
the prefix that it continues. `uploads/` has checked every number before."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from paceline.groups import (
    MAX_HOLDERS,
    Completion,
    Group,
    IntArray,
    Version,
    VersionSpan,
    continued_spans,
    held_attempt,
    joined_spans,
)
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.exchange.uploads.intake import UploadedGroup
from paceline.services.coordinator.ledger.segments import DamagedRecord, UnopenedSegment
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import decode_completions, parse_message


def fault_of_ids(exchange: Exchange, run: ActiveRun, max_id: int) -> str:
    """Return why the learner cannot embed the largest token id; empty if it can, or has reported no vocabulary yet."""
    vocab_size = exchange.ledger.run(run.run_id)["vocab_size"]
    if vocab_size and max_id >= vocab_size:
        return f"token id {max_id} is not below the vocabulary's size {vocab_size}"
    return ""


def fault_of_result(
    exchange: Exchange, run: ActiveRun, row: sqlite3.Row, attempt: int, member_id: str, uploaded: UploadedGroup
) -> str:
    """Return why the ids, versions, samplers or continued prefix of a result are impossible; empty if they are
    possible. A worker's tokens have versions that it acknowledged or was offered, and the worker as their sampler; the
    prefix of its lease has versions and samplers of earlier holders. Workers of 0.1.0 name no sampler, also in a prefix
    that they continue. The turns of rows were compared when they were submitted."""
    group = uploaded.group
    if (fault := fault_of_ids(exchange, run, uploaded.max_id)) or group.rows is not None:
        return fault
    versions = {span[:2] for c in group.completions for span in c.spans}
    newest, step = Version(*max(versions, default=(0, 0))), max([step for _, step in versions], default=0)
    held = exchange.workers.newest_of(member_id)
    is_held = held is not None and newest <= held and step <= held.step
    fault = "" if is_held else _fault_of_existence(exchange, run, newest.session, step)
    if fault := fault or _fault_of_sessions(exchange, run, versions):
        return fault
    try:
        prefix = _prefix_of(exchange, run, row)
    except (DamagedRecord, UnopenedSegment):  # the prefix cannot be compared; the result replaces it
        return _fault_of_holders(group, member_id, row, attempt)
    lost = attempt > 1 and prefix is None and exchange.ledger.counters(run.run_id).get("failures:damaged")
    if held is not None and newest > held and not lost and (prefix is None or newest > prefix.newest):
        return f"version {tuple(newest)} in spans is newer than {tuple(held)}, the newest that {member_id} acknowledged"
    if lost or (prefix is not None and attempt <= prefix.attempt):  # leased before the prefix was returned
        return _fault_of_holders(group, member_id, row, attempt)
    fault = "" if prefix is None else _fault_of_continuation(prefix, group)
    return fault or _fault_of_samplers(prefix, group, member_id)


def fault_of_versions(exchange: Exchange, run: ActiveRun, versions: Collection[Version]) -> str:
    """Return why one of `versions` cannot exist yet; empty if all can. A version can exist as soon as the batch before
    it is fixed, even if no worker has acknowledged it: a worker may have sampled from it and left."""
    row, newest = exchange.ledger.run(run.run_id), max(versions)
    step = max(version.step for version in versions)
    is_behind = newest.session > row["session"] or step > row["next_batch"]
    fault = _fault_of_existence(exchange, run, newest.session, step) if is_behind else ""
    return fault or _fault_of_sessions(exchange, run, versions)


def _fault_of_existence(exchange: Exchange, run: ActiveRun, session: int, step: int) -> str:
    """Return why the newest session and step of a group's tokens cannot exist yet; empty if they can."""
    row = exchange.ledger.run(run.run_id)
    # The workers' versions are needed only if the run's row is behind.
    if session > row["session"] or step > row["published_step"]:
        versions = [*exchange.workers.versions.values(), *exchange.workers.offered.values()]
        if session > (bound := max([row["session"], *(version.session for version in versions)])):
            return f"spans has session {session}, but the newest is {bound}"
        if step > (bound := max([row["published_step"], *(version.step for version in versions)])):
            return f"spans has step {step}, but the newest version has {bound}"
    return ""


def _fault_of_sessions(exchange: Exchange, run: ActiveRun, versions: Iterable[tuple[int, int]]) -> str:
    """Return which version no session has published; empty if there is none. Only the workers know the sessions that a
    restored ledger lacks."""
    begun = exchange.ledger.sessions(run.run_id)
    for session, step in versions:
        if session < 1 or (begun and session not in begun and session not in exchange.workers.session_numbers):
            return (
                f"spans has session {session}, which the run never had; its newest session is {max(begun, default=0)}"
            )
        if step < (first := begun.get(session, 0)):
            return f"spans has step {step} of session {session}, which publishes from step {first} on"
    return ""


class Prefix(NamedTuple):
    attempt: int
    """Number of the attempt that returned the prefix."""
    prompt_ids: IntArray
    completions: tuple[Completion, ...]

    @property
    def newest(self) -> Version:
        """Return the newest version of any token in the prefix. Earlier attempts may have sampled some of them."""
        return Version(*max((span[:2] for c in self.completions for span in c.spans), default=(0, 0)))


def _prefix_of(exchange: Exchange, run: ActiveRun, row: sqlite3.Row) -> Prefix | None:
    """Return the stored prefix of a group; None if there is none. Raises DamagedRecord, UnopenedSegment."""
    if row["attempt"] < 2:
        return None
    stored = exchange.ledger.payload(run.run_id, row["group_id"], "prefix")
    if stored is None:
        return None
    header, arrays = stored.read()
    returned = parse_message(pb.LeaseReturn, header)
    reasons = returned.finish_reasons
    return Prefix(returned.attempt, *decode_completions(arrays, reasons, [""] * len(reasons)))


def _fault_of_continuation(prefix: Prefix, group: Group) -> str:
    """Return how a group deviates from its lease's prefix; empty if it continues it."""
    if not np.array_equal(prefix.prompt_ids, group.prompt_ids):
        return "prompt_ids differ from those of the lease's prefix"
    for index, (before, now) in enumerate(zip(prefix.completions, group.completions, strict=True)):
        size = len(before.token_ids)
        if before.finish_reason != "abort" and len(now.token_ids) != size:
            return f"completion {index} has {len(now.token_ids)} tokens, but the lease's prefix finished it with {size}"
        same = (
            np.array_equal(before.token_ids, now.token_ids[:size])
            and np.array_equal(before.logprobs, now.logprobs[:size])
            and np.array_equal(_versions_T(before), _versions_T(now)[:size])
        )
        if not same:
            return f"completion {index} does not begin with the {size} tokens of the lease's prefix"
    return ""


def _fault_of_samplers(prefix: Prefix | None, group: Group, member_id: str) -> str:
    """Return which tokens of a result name a wrong sampler; empty if there are none, or if no token names a sampler.
    The result continues the prefix, so only the samplers of its spans can differ."""
    samplers = _samplers_of(group)
    if not any(samplers) or (prefix is None and samplers == {member_id}):
        return ""
    for index, completion in enumerate(group.completions):
        begun: Sequence[VersionSpan] = () if prefix is None else prefix.completions[index].spans
        expected = joined_spans(continued_spans(begun, completion.spans, member_id))
        for span, right in zip(joined_spans(completion.spans), expected, strict=False):
            if span != right:
                return (
                    f"samplers has {span.sampler!r} for tokens {span.start} to {span.end} of completion {index}, but "
                    f"{right.sampler!r} sampled tokens {right.start} to {right.end}; a result keeps the samplers of its "
                    f"prefix and names {member_id} for all other tokens"
                )
    return ""


def _samplers_of(group: Group) -> set[str]:
    return {span.sampler for completion in group.completions for span in completion.spans}


def _fault_of_holders(group: Group, member_id: str, row: sqlite3.Row, attempt: int) -> str:
    """For a result whose prefix cannot be compared, return which of its samplers had neither the lease of its attempt
    nor an earlier lease; empty if there are none."""
    earlier = range(max(1, attempt - MAX_HOLDERS), attempt)
    holders = {member_id, *(held_attempt(row["holders"], number) for number in earlier)} - {""}
    if others := _samplers_of(group) - holders - {""}:
        return (
            f"sampler_names has {sorted(others)[:8]}, but attempts up to {attempt} were leased to {sorted(holders)[:8]}; "
            "each token must name the worker that sampled it"
        )
    return ""


def _versions_T(completion: Completion) -> np.ndarray:
    """Return an array [T, 2] with the session and the step of each token's version."""
    spans = completion.spans
    versions = np.array([(span.session, span.step) for span in spans], np.int64).reshape(-1, 2)
    return np.repeat(versions, [span.end - span.start for span in spans], axis=0)
