"""Commits generated groups, returned leases and turns of episodes after checks against the ledger, in its transaction.

`uploads/` has checked every number before. Faults are answered INVALID, with the field, its value and the bound. A turn
of an episode is committed once, by the attempt that holds its group, in the order of its sample's turns. While a group
is open, its row counts the tokens of its logged turns, so the token accounting balances after every turn.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from paceline.errors import SpecError
from paceline.groups import Completion, Group, IntArray, Version, held_attempt
from paceline.services.coordinator.exchange import evaluation, leases, turn_logs
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange, Outcome
from paceline.services.coordinator.exchange.turn_logs import end_life
from paceline.services.coordinator.exchange.uploads.intake import Arrived, UploadedTurn
from paceline.services.coordinator.ledger.groups import Generated, State
from paceline.services.coordinator.ledger.segments import DamagedRecord, UnopenedSegment
from paceline.services.coordinator.ledger.tables.episodes import FAILED, RESTARTED, FinishedTurn
from paceline.services.coordinator.text_limits import cut
from paceline.spec import RunSpec
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import MAX_MESSAGE_BYTES, decode_completions, parse_message

FINAL_DATA_ERRORS = frozenset({"bad_prompt", "prompt_too_long"})
"""Reasons for which every other attempt would fail too, so that the group is dropped at once."""

DATA_ERRORS = FINAL_DATA_ERRORS | {"", "invalid_result"}
"""Reasons that a worker may give for a failed attempt. With an empty reason other attempts follow, and the last failure
drops the group as `bad_prompt`."""

MAX_ERROR_CHARS = 4096
"""Largest number of characters that are kept of a worker's message."""


def submit_group(exchange: Exchange, run: ActiveRun, arrived: Arrived) -> Outcome:
    """Commit a checked and stored group. The first valid result of any attempt wins while the group is admitted or leased."""
    request, group = arrived.request, arrived.group
    result = request.group
    row = exchange.group(run, result.group_id)
    if row is None:
        return exchange.stale(request, f"no group {result.group_id} in run {run.run_id}")
    if held_attempt(row["holders"], result.attempt) != request.member_id:
        attempt = f"attempt {result.attempt} of group {result.group_id}"
        return exchange.stale(request, f"{attempt} was never leased to {request.member_id}")
    if row["state"] not in (State.ADMITTED, State.LEASED) and (arrived.is_decided or group is not None):
        if group is not None and result.digest != row["digest"]:  # else it is the accepted result, sent again
            exchange.ledger.count(run.run_id, "tokens:wasted", group.num_tokens)
            leases.note_submission(exchange, exchange.lease_durations, request.member_id, result)
        return exchange.duplicate(request, f"group {result.group_id} is {row['state']} already")
    # It was decided when the result arrived; since then its record was found damaged, and the group is generated again.
    if arrived.is_decided:
        return exchange.stale(request, f"group {result.group_id} is {row['state']} again")
    if group is None or arrived.location is None:
        exchange.lease_durations.note_refusal(request.member_id)
        return exchange.refuse(request, arrived.fault)
    if fault := _fault_of_form(run, group, run.group_size(row["class"])):
        return exchange.refuse(request, fault)
    if row["class"] != "train":
        pinned = evaluation.pinned_version(exchange, run, row)
        if any(span[:2] != pinned for completion in group.completions for span in completion.spans):
            if row["lease_step"] == pinned.step:  # else the evaluation was pinned to another version since
                exchange.lease_durations.note_refusal(request.member_id)
            # Else another worker has the group's episodes.
            if group.rows is None or result.attempt == row["attempt"]:
                exchange.groups.readmit(run.run_id, result.group_id)
            return exchange.stale(request, f"group {result.group_id} has tokens of another version than its evaluation")
    fault, turn_log = _fault(exchange, run, arrived, row, result.attempt), None
    if not fault and group.rows is not None:
        turn_log = turn_logs.of_group(exchange, run, result.group_id)
        fault = turn_logs.fault_of_result(turn_log, group, arrived.turns)
        if fault and result.attempt < row["attempt"]:
            return exchange.stale(request, f"a later attempt has changed group {result.group_id}: {fault}")
    if fault:
        exchange.lease_durations.note_refusal(request.member_id)
        return exchange.refuse(request, f"group {result.group_id}: {fault}")
    if turn_log is not None:  # its tokens were counted turn by turn
        turn_logs.end_left_out(exchange, run, row, turn_log)
    else:
        _count_tokens(exchange, run, row, group.num_tokens)
    if row["attempt"] > 1 or turn_log is not None:  # prefix or turns of earlier attempts
        exchange.ledger.remove_payloads(run.run_id, result.group_id)
    exchange.ledger.add_payload(run.run_id, result.group_id, "result", arrived.location)
    leases.note_submission(exchange, exchange.lease_durations, request.member_id, result)
    leases.clear_deaths(exchange, run, result.group_id)
    generated = Generated(group.num_tokens, group.num_sequence_tokens, group.oldest_step, result.digest)
    exchange.groups.commit(run.run_id, result.group_id, generated)
    exchange.throughput.generated[request.member_id] += run.share_of_group(row["class"])
    if row["class"] == "train":
        exchange.drops_in_a_row.end_of_generation()
    else:
        evaluation.unpin_if_generated(exchange, run, row["class"])
    return exchange.committed(request)


def return_lease(exchange: Exchange, run: ActiveRun, arrived: Arrived) -> Outcome:
    """Accept a lease that a worker returns: draining, perhaps with unfinished samples, or because the prompt is bad."""
    request = arrived.request
    returned = request.lease_return
    row = exchange.group(run, returned.group_id)
    if row is not None and row["state"] == State.ADMITTED and row["member_id"] == request.member_id:
        # The lease was revoked already, and `restore_leases` must not give it to this worker again.
        exchange.groups.clear_holder(run.run_id, returned.group_id)
    held = (returned.attempt, request.member_id)
    if row is None or row["state"] != State.LEASED or (row["attempt"], row["member_id"]) != held:
        attempt = f"attempt {returned.attempt} of group {returned.group_id}"
        return exchange.stale(request, f"{attempt} is not leased to {request.member_id}")
    if returned.data_error_reason not in DATA_ERRORS:
        allowed = ", ".join(sorted(DATA_ERRORS - {""}))
        reason = returned.data_error_reason[:64]
        return exchange.refuse(request, f"data_error_reason {reason!r} is none of {allowed}")
    if returned.data_error:
        return _failed(exchange, run, request, row)
    if arrived.frames and run.spec.environment.is_used:
        return exchange.refuse(
            request,
            f"group {returned.group_id} was returned with samples, but a run with an environment submits them turn by turn",
        )
    if arrived.frames and row["class"] == "train":
        prefix = arrived.group
        if prefix is None or arrived.location is None:
            return exchange.refuse(request, arrived.fault)
        expected = run.spec.grpo.num_generations_per_prompt
        if prefix.rows is not None or len(prefix.completions) != expected:
            number = len(prefix.completions)
            return exchange.refuse(
                request, f"group {returned.group_id} was returned with {number} samples, not {expected}"
            )
        if fault := _fault(exchange, run, arrived, row, returned.attempt):
            return exchange.refuse(request, f"the prefix of group {returned.group_id}: {fault}")
        exchange.ledger.add_payload(run.run_id, returned.group_id, "prefix", arrived.location)
        oldest = prefix.oldest_step if prefix.oldest_step >= 0 else row["lease_step"]
        exchange.groups.set_prefix_step(run.run_id, returned.group_id, oldest)
    exchange.groups.end_lease(run.run_id, returned.group_id, request.member_id, returned.attempt)
    return exchange.committed(request)


def _fault_of_form(run: ActiveRun, group: Group, expected: int) -> str:
    """Return how a group deviates from the form that the run's leases require; empty if it does not."""
    if run.spec.environment.is_used != (group.rows is not None):
        has, needs = ("rows", "no") if group.rows is not None else ("no rows", "an")
        return f"group {group.group_id} has {has}, but the run has {needs} environment"
    if group.num_samples != expected:
        unit = "completions" if group.rows is None else "samples"
        return f"group {group.group_id} has {group.num_samples} {unit}, not {expected}"
    return ""


def _fault(exchange: Exchange, run: ActiveRun, arrived: Arrived, row: sqlite3.Row, attempt: int) -> str:
    """Return how the result contradicts the ledger; empty if it does not."""
    assert arrived.group is not None
    return fault_of_ids(exchange, run, arrived.max_id) or fault_of_group(
        exchange, run, row, attempt, arrived.request.member_id, arrived.group
    )


def _failed(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, row: sqlite3.Row) -> Outcome:
    """Count an attempt that failed because of the group's data; other attempts may follow, up to the limit."""
    returned, reason = request.lease_return, request.lease_return.data_error_reason or "bad_prompt"
    is_final = returned.data_error_reason in FINAL_DATA_ERRORS
    allowed = 1 if is_final else run.spec.grpo.max_generation_failures
    failures, error = row["generation_failures"] + 1, returned.data_error[:MAX_ERROR_CHARS]
    exchange.groups.fail_generation(run.run_id, row["group_id"], failures)
    evaluation.fail(exchange, run, row, "generating", reason, error, failures, allowed)
    return exchange.committed(request)


ARRAY_BYTES = 8
"""Bytes of a token in a payload frame: its id and its log-probability."""


def fault_of_ids(exchange: Exchange, run: ActiveRun, max_id: int) -> str:
    """Return why the learner cannot embed the largest token id; empty if it can or its vocabulary is not reported."""
    vocab_size = exchange.ledger.run(run.run_id)["vocab_size"]
    if vocab_size and max_id >= vocab_size:
        return f"token id {max_id} is not below the vocabulary's size {vocab_size}"
    return ""


def fault_of_group(
    exchange: Exchange, run: ActiveRun, row: sqlite3.Row, attempt: int, member_id: str, group: Group
) -> str:
    """Return why the versions or the continued prefix of a result are impossible; empty if they are possible. A
    worker's tokens have versions that it acknowledged or was offered; the prefix of its lease has versions of
    earlier holders. The turns of rows were compared when they were submitted."""
    if group.rows is not None:
        return ""
    versions = {span[:2] for c in group.completions for span in c.spans}
    newest, step = Version(*max(versions, default=(0, 0))), max([step for _, step in versions], default=0)
    held = exchange.newest_of(member_id)
    is_held = held is not None and newest <= held and step <= held.step
    fault = "" if is_held else _fault_of_existence(exchange, run, newest.session, step)
    if fault := fault or _fault_of_sessions(exchange, run, versions):
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
    """Return why one of `versions` cannot exist yet; empty if all can. Any rollout worker may have sampled from them,
    also one that left before it could acknowledge them: a version is published once the batch before it is fixed."""
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
        versions = [*exchange.versions.values(), *exchange.offered.values()]
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
        if session < 1 or (begun and session not in begun and session not in exchange.session_numbers):
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
        """Return the newest version among the prefix's tokens, including those of earlier attempts."""
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


def _versions_T(completion: Completion) -> np.ndarray:
    """Return an array [T, 2] with the session and the step of each token's version."""
    spans = completion.spans
    versions = np.array([(span.session, span.step) for span in spans], np.int64).reshape(-1, 2)
    return np.repeat(versions, [span.end - span.start for span in spans], axis=0)


def refuse_large_groups(spec: RunSpec) -> None:
    """Raise SpecError if the run's groups are too large for a message."""
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


REASONS = (RESTARTED, FAILED)


def submit_turn(exchange: Exchange, run: ActiveRun, arrived: Arrived) -> Outcome:
    request, turn, episodes = arrived.request, arrived.request.turn, exchange.ledger.episodes
    row = exchange.group(run, turn.group_id)
    if (refusal := _refusal(exchange, run, request, row, turn)) is not None:
        return refusal
    assert row is not None
    lives = episodes.lives(run.run_id, turn.group_id, turn.sample)
    if turn.life < lives.current or lives.given_up:
        return exchange.stale(request, f"life {turn.life} of {_name(turn)} has ended")
    last = episodes.last_turn(run.run_id, turn.group_id, turn.sample, lives.current)
    next_turn = 0 if last is None else last["turn"] + 1
    if turn.life == lives.current and turn.index < next_turn:
        return exchange.duplicate(request, f"turn {turn.index} of {_name(turn)} is in the ledger already")
    if arrived.is_decided:  # it was when the turn arrived; since then its life has ended
        return exchange.stale(request, f"{_name(turn)} continues after turn {next_turn - 1}")
    uploaded = arrived.turn
    if uploaded is None or arrived.location is None:
        return exchange.refuse(request, arrived.fault)
    if row["class"] != "train" and uploaded.versions != {evaluation.pinned_version(exchange, run, row)}:
        return exchange.stale(request, f"{_name(turn)} has tokens of another version than its evaluation")
    fault = (
        _fault_of_order(turn, lives.current, last)
        or fault_of_ids(exchange, run, uploaded.max_id)
        or fault_of_versions(exchange, run, uploaded.versions)
    )
    num_rows = 0 if last is None else last["num_rows"]
    row_tokens = uploaded.num_context + uploaded.num_tokens
    if uploaded.row_index < num_rows:
        row_tokens += episodes.row_tokens(run.run_id, turn.group_id, turn.sample, turn.life, uploaded.row_index)
    fault = fault or _fault_of_row(run, uploaded, num_rows, row_tokens)
    if fault:
        return exchange.refuse(request, f"turn {turn.index} of {_name(turn)}: {fault}")
    episodes.add(
        FinishedTurn(
            run.run_id,
            turn.group_id,
            turn.sample,
            turn.life,
            turn.index,
            turn.last,
            json.dumps(uploaded.left_out),
            uploaded.row_index,
            max(num_rows, uploaded.row_index + 1),
            row_tokens,
            uploaded.num_tokens,
            uploaded.oldest_step,
            uploaded.digest,
            uploaded.context_digest,
        ),
        arrived.location,
    )
    recorded = uploaded.oldest_step if row["oldest_step"] is None else row["oldest_step"]
    oldest_step = min(recorded, uploaded.oldest_step)
    exchange.groups.set_turns(run.run_id, turn.group_id, row["tokens"] + uploaded.num_tokens, oldest_step)
    exchange.throughput.turns += 1
    _count_tokens(exchange, run, row, uploaded.num_tokens)
    exchange.lease_durations.note_progress(request.member_id)
    return exchange.committed(request)


def _count_tokens(exchange: Exchange, run: ActiveRun, row: sqlite3.Row, num_tokens: int) -> None:
    exchange.throughput.tokens += num_tokens
    if row["class"] == "train":
        exchange.ledger.count(run.run_id, "tokens:generated", num_tokens)


def end_episode(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest) -> Outcome:
    """End an unfinished life of a sample: its tokens are dropped. A new life begins unless the sample is given up."""
    end, episodes = request.episode_end, exchange.ledger.episodes
    row = exchange.group(run, end.group_id)
    if (refusal := _refusal(exchange, run, request, row, end)) is not None:
        return refusal
    assert row is not None
    if end.reason not in REASONS or (end.give_up and end.reason != FAILED):
        return exchange.refuse(
            request,
            f"reason is {end.reason[:64]!r} with give_up {str(end.give_up).lower()}, but must be "
            f"{' or '.join(REASONS)}; with give_up it must be {FAILED}",
        )
    lives = episodes.lives(run.run_id, end.group_id, end.sample)
    if end.life < lives.current:
        return exchange.duplicate(request, f"life {end.life} of {_name(end)} has ended already")
    last = episodes.last_turn(run.run_id, end.group_id, end.sample, lives.current)
    if end.life != lives.current or (last is not None and last["last"]):
        why = "the sample is finished" if end.life == lives.current else f"the sample is in life {lives.current}"
        return exchange.refuse(request, f"life {end.life} of {_name(end)} cannot end: {why}")
    end_life(exchange, run, row, end.sample, end.reason, cut(end.error), give_up=end.give_up)
    if end.reason == FAILED:
        _note_failure(exchange, run, row, end, lives.failures + 1)
    exchange.lease_durations.note_progress(request.member_id)
    return exchange.committed(request)


def _note_failure(exchange: Exchange, run: ActiveRun, row: sqlite3.Row, end: pb.EpisodeEnd, failures: int) -> None:
    exchange.ledger.count(run.run_id, f"failures:{FAILED}")
    error, allowed = cut(end.error), run.spec.environment.max_failures
    if not end.give_up:
        if exchange.failure_counts.failed(error):
            exchange.warn(f"{_name(end)} failed in its environment ({failures} of {allowed}) and begins again: {error}")
        return
    lives = exchange.ledger.episodes.lives_of_group(run.run_id, row["group_id"])
    size = run.group_size(row["class"])
    if sum(sample.given_up for sample in lives.values()) < size:
        if number := exchange.failure_counts.dropped(error):
            alike = f", the {number}th for this cause" if number > 1 else ""
            exchange.warn(f"{_name(end)} was given up{alike}; its group continues without it: {error}")
        return
    exchange.note_failure(row, "running", FAILED, error, failures, failures)
    evaluation.drop(exchange, run, exchange.group(run, row["group_id"]) or row, FAILED, error)


def _refusal(
    exchange: Exchange,
    run: ActiveRun,
    request: pb.ExchangeRequest,
    row: sqlite3.Row | None,
    of: pb.EpisodeTurn | pb.EpisodeEnd,
) -> Outcome | None:
    """Refuse a sender that does not hold the group, or that names a sample outside the group. A silent worker whose
    lease was revoked still counts as the holder until another worker gets the group."""
    is_open = row is not None and row["state"] in (State.ADMITTED, State.LEASED)
    if row is None or not is_open or (row["attempt"], row["member_id"]) != (of.attempt, request.member_id):
        attempt = f"attempt {of.attempt} of group {of.group_id}"
        return exchange.stale(request, f"{attempt} is not leased to {request.member_id}")
    size = run.group_size(row["class"])
    if of.sample >= size:
        return exchange.refuse(request, f"group {of.group_id} has samples 0 to {size - 1}, not {of.sample}")
    return None


def _fault_of_order(turn: pb.EpisodeTurn, life: int, last: sqlite3.Row | None) -> str:
    """Return why a turn does not follow the newest one in the ledger; empty if it does."""
    if turn.life != life:
        return f"life {turn.life} has not begun; the sample is in life {life}"
    if last is not None and last["last"]:
        return f"the sample was finished with turn {last['turn']}"
    next_turn = 0 if last is None else last["turn"] + 1
    return "" if turn.index == next_turn else f"the next turn must be {next_turn}"


def _fault_of_row(run: ActiveRun, turn: UploadedTurn, num_rows: int, row_tokens: int) -> str:
    """Return why a turn cannot extend its row; empty if it can."""
    if turn.row_index > num_rows:
        return f"row {turn.row_index} is neither one of the sample's {num_rows} rows nor the next row"
    if turn.row_index == num_rows and not turn.num_context:
        return f"context_ids is empty, but the turn begins row {num_rows}, whose prompt must have at least one token"
    longest = run.spec.policy.max_total_sequence_length
    if row_tokens > longest:
        return f"row {turn.row_index} has {row_tokens} tokens, more than policy.max_total_sequence_length {longest}"
    return ""


def _name(of: pb.EpisodeTurn | pb.EpisodeEnd) -> str:
    return f"sample {of.sample} of group {of.group_id}"
