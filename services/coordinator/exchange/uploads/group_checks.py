"""Checks of a group against the ledger before it is committed, inside the transaction: few numbers for each group.

`array_checks.py` has checked every number before. Faults are answered INVALID, with the field, its value and the bound.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from paceline.errors import SpecError
from paceline.groups import Completion, Group, IntArray, Version
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.ledger.segments import DamagedRecord, UnopenedSegment
from paceline.spec import RunSpec
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import MAX_MESSAGE_BYTES, decode_completions, parse_message

ARRAY_BYTES = 8
"""Size of a token in a payload frame: its id and its log-probability."""


def fault_of_ids(exchange: Exchange, run: ActiveRun, max_id: int) -> str:
    """Return why the learner could not look up the largest token id; empty where it can, or where its vocabulary is not
    known yet.
    """
    vocab_size = exchange.ledger.run(run.run_id)["vocab_size"]
    if vocab_size and max_id >= vocab_size:
        return f"token id {max_id} is not below the vocabulary's size {vocab_size}"
    return ""


def fault_of_group(
    exchange: Exchange, run: ActiveRun, row: sqlite3.Row, attempt: int, member_id: str, group: Group
) -> str:
    """Return why the result of an attempt cannot be true: its versions, or a prefix that it does not go on from. Empty
    where it can.

    The tokens of a worker are of versions that it acknowledged, or that are on their way to it; the prefix of its lease
    is of versions that an earlier holder had. The turns of rows were compared when they were journaled.
    """
    if group.rows is not None:
        return ""
    versions = {span[:2] for c in group.completions for span in c.spans}
    newest, step = Version(*max(versions, default=(0, 0))), max([step for _, step in versions], default=0)
    held = exchange.newest_of(member_id)
    is_held = held is not None and newest <= held and step <= held.step
    fault = "" if is_held else _fault_of_existence(exchange, run, newest.session, step)
    if fault:
        return fault
    try:
        prefix = _prefix_of(exchange, run, row)
    except (DamagedRecord, UnopenedSegment):
        return ""  # the prefix cannot be compared; the result replaces it
    if held is not None and newest > held:
        lost = attempt > 1 and prefix is None and exchange.ledger.counters(run.run_id).get("failures:damaged")
        if not lost and (prefix is None or newest > prefix.newest):
            return f"version {tuple(newest)} in spans is newer than {tuple(held)}, the newest that {member_id} acknowledged"
    if prefix is None or attempt <= prefix.attempt:  # leased before the prefix was returned
        return ""
    return _fault_of_continuation(prefix, group)


def fault_of_versions(exchange: Exchange, run: ActiveRun, versions: Collection[Version]) -> str:
    """Return why the run has not come to one of these versions; empty where it has. Any rollout worker may have sampled from
    them, also one that left before it could acknowledge them: a version is published once the batch before it is fixed.
    """
    row, newest = exchange.ledger.run(run.run_id), max(versions)
    step = max(version.step for version in versions)
    if newest.session > row["session"] or step > row["next_batch"]:
        return _fault_of_existence(exchange, run, newest.session, step)
    return ""


def _fault_of_existence(exchange: Exchange, run: ActiveRun, session: int, step: int) -> str:
    """Return why the newest session and step of a group's tokens are not the run's; empty where they are."""
    row = exchange.ledger.run(run.run_id)
    # Each worker's version is compared only where these are not enough.
    if session > row["session"] or step > row["published_step"]:
        newest_session, newest_step = exchange.newest_session_and_step()
        if session > (bound := max(row["session"], newest_session)):
            return f"session {session} in spans is beyond the newest, {bound}"
        if step > (bound := max(row["published_step"], newest_step)):
            return f"step {step} in spans is beyond the newest version's, {bound}"
    return ""


class Prefix(NamedTuple):
    """The prefix that an earlier worker returned of a group."""

    attempt: int
    """Attempt that returned it."""
    prompt_ids: IntArray
    completions: tuple[Completion, ...]

    @property
    def newest(self) -> Version:
        """Newest version of its tokens. The prefix of earlier attempts is a part of it."""
        return Version(*max((span[:2] for c in self.completions for span in c.spans), default=(0, 0)))


def _prefix_of(exchange: Exchange, run: ActiveRun, row: sqlite3.Row) -> Prefix | None:
    """Return the prefix of a group that is on record; None without one. Raises DamagedRecord, UnopenedSegment."""
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
    """Return why a group does not go on from its lease's prefix; empty where it does."""
    if not np.array_equal(prefix.prompt_ids, group.prompt_ids):
        return "prompt_ids are not those that the lease came with"
    for index, (before, now) in enumerate(zip(prefix.completions, group.completions, strict=True)):
        size = len(before.token_ids)
        if before.finish_reason != "abort" and len(now.token_ids) != size:
            return f"completion {index} has {len(now.token_ids)} tokens, but was finished with {size}"
        same = (
            np.array_equal(before.token_ids, now.token_ids[:size])
            and np.array_equal(before.logprobs, now.logprobs[:size])
            and np.array_equal(_versions_T(before), _versions_T(now)[:size])
        )
        if not same:
            return f"completion {index} does not begin with the {size} tokens that the lease came with"
    return ""


def _versions_T(completion: Completion) -> np.ndarray:
    """Return [T, 2] session and step of each token."""
    spans = completion.spans
    versions = np.array([(span.session, span.step) for span in spans], np.int64).reshape(-1, 2)
    return np.repeat(versions, [span.end - span.start for span in spans], axis=0)


def refuse_large_groups(spec: RunSpec) -> None:
    """Raises SpecError for a run whose groups no message could carry."""
    if not spec.samples:
        return
    sizes = {
        "grpo.num_generations_per_prompt": spec.grpo.num_generations_per_prompt,
        "grpo.val_samples_per_prompt": spec.grpo.val_samples_per_prompt,
    }
    name = max(sizes, key=lambda name: sizes[name])
    completions, tokens = sizes[name], spec.policy.generation.max_new_tokens
    size_bytes = completions * tokens * ARRAY_BYTES + spec.policy.max_total_sequence_length * ARRAY_BYTES
    if size_bytes > MAX_MESSAGE_BYTES:
        raise SpecError(
            f"{name} {completions} x policy.generation.max_new_tokens {tokens} make groups of up to "
            f"{size_bytes >> 20} MiB, but a message carries {MAX_MESSAGE_BYTES >> 20} MiB; lower one of the two"
        )
