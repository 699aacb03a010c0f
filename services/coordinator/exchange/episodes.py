"""Handlers for the turns of episodes and the ends of their lives: what environment workers journal while they hold a lease.

A turn is committed once, by the attempt that holds its group, in the order of its sample's turns. While a group is open,
its row has the tokens of its journal, so the token accounting balances after every turn.
"""

from __future__ import annotations

import json
import sqlite3

from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.journals import end_life
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange, Outcome
from paceline.services.coordinator.exchange.submissions import fault_of_ids, fault_of_versions
from paceline.services.coordinator.exchange.uploads.intake import Arrived, UploadedTurn
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.tables.episodes import FAILED, RESTARTED, JournaledTurn
from paceline.services.coordinator.text_limits import cut
from paceline.v1 import exchange_pb2 as pb

REASONS = (RESTARTED, FAILED)
"""Reasons of an end that workers may give."""


def submit_turn(exchange: Exchange, run: ActiveRun, arrived: Arrived) -> Outcome:
    """Commit a finished turn that has been checked and stored."""
    request, turn, episodes = arrived.request, arrived.request.turn, exchange.ledger.episodes
    row = exchange.group(run, turn.group_id)
    refusal = _refusal(exchange, run, request, row, turn)
    if refusal is not None:
        return refusal
    assert row is not None
    lives = episodes.lives(run.run_id, turn.group_id, turn.sample)
    if turn.life < lives.current or lives.given_up:
        return exchange.stale(request, f"life {turn.life} of {_name(turn)} has ended")
    last = episodes.last_turn(run.run_id, turn.group_id, turn.sample, lives.current)
    next_turn = 0 if last is None else last["turn"] + 1
    if turn.life == lives.current and turn.index < next_turn:
        return exchange.duplicate(request, f"turn {turn.index} of {_name(turn)} is in the ledger already")
    if arrived.is_decided:  # it was when the turn arrived; its life has ended since
        return exchange.stale(request, f"{_name(turn)} goes on after turn {next_turn - 1}")
    uploaded = arrived.turn
    if uploaded is None or arrived.location is None:
        return exchange.refuse(request, arrived.fault)
    if row["class"] != "train" and uploaded.versions != {evaluation.pinned_version(exchange, run, row)}:
        return exchange.stale(request, "tokens of another version than the evaluation's")
    fault = (
        _fault_of_order(turn, lives.current, last)
        or fault_of_ids(exchange, run, uploaded.max_id)
        or fault_of_versions(exchange, run, uploaded.versions)
    )
    num_rows = 0 if last is None else last["num_rows"]
    row_tokens = uploaded.num_context + uploaded.num_tokens
    if uploaded.row_index < num_rows:
        row_tokens += episodes.row_tokens(
            run.run_id, turn.group_id, turn.sample, turn.life, uploaded.row_index
        )
    fault = fault or _fault_of_row(run, uploaded, num_rows, row_tokens)
    if fault:
        return exchange.refuse(request, f"turn {turn.index} of {_name(turn)}: {fault}")
    episodes.add(
        JournaledTurn(
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
    oldest_step = (
        uploaded.oldest_step if row["oldest_step"] is None else min(row["oldest_step"], uploaded.oldest_step)
    )
    exchange.groups.set_journal(run.run_id, turn.group_id, row["tokens"] + uploaded.num_tokens, oldest_step)
    if row["class"] == "train":
        exchange.ledger.count(run.run_id, "tokens:generated", uploaded.num_tokens)
    exchange.lease_durations.note_progress(request.member_id)
    return exchange.committed(request)


def end_episode(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest) -> Outcome:
    """End the life of a sample that is not finished: its tokens are dropped, and the next life begins, unless the
    sample is given up."""
    end, episodes = request.episode_end, exchange.ledger.episodes
    row = exchange.group(run, end.group_id)
    refusal = _refusal(exchange, run, request, row, end)
    if refusal is not None:
        return refusal
    assert row is not None
    if end.reason not in REASONS or (end.give_up and end.reason != FAILED):
        return exchange.refuse(
            request,
            f"reason {end.reason[:64]!r} with give_up {str(end.give_up).lower()}: a life ends as {' or '.join(REASONS)}, and a "
            f"sample is given up as {FAILED}",
        )
    lives = episodes.lives(run.run_id, end.group_id, end.sample)
    if end.life < lives.current:
        return exchange.duplicate(request, f"life {end.life} of {_name(end)} has ended already")
    last = episodes.last_turn(run.run_id, end.group_id, end.sample, lives.current)
    if end.life != lives.current or (last is not None and last["last"]):
        what = "is finished" if end.life == lives.current else f"is in life {lives.current}"
        return exchange.refuse(request, f"life {end.life} of {_name(end)} cannot end: the sample {what}")
    end_life(exchange, run, row, end.sample, end.reason, cut(end.error), give_up=end.give_up)
    if end.reason == FAILED:
        _note_failure(exchange, run, row, end, lives.failures + 1)
    exchange.lease_durations.note_progress(request.member_id)
    return exchange.committed(request)


def _note_failure(
    exchange: Exchange, run: ActiveRun, row: sqlite3.Row, end: pb.EpisodeEnd, failures: int
) -> None:
    """Count a fault of the environment; drop a group of which every sample was given up."""
    exchange.ledger.count(run.run_id, f"failures:{FAILED}")
    error, allowed = cut(end.error), run.spec.environment.max_failures
    if not end.give_up:
        if exchange.failure_counts.failed(error):
            exchange.warn(
                f"{_name(end)} failed in its environment ({failures} of {allowed}) and begins again: {error}"
            )
        return
    lives = exchange.ledger.episodes.lives_of_group(run.run_id, row["group_id"])
    size = run.group_size(row["class"])
    if sum(sample.given_up for sample in lives.values()) < size:
        if number := exchange.failure_counts.dropped(error):
            alike = f", the {number}th for this cause" if number > 1 else ""
            exchange.warn(f"{_name(end)} was given up{alike}; its group goes on without it: {error}")
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
    """Return the answer to a sender that does not hold the group, or that names no sample of it. A lease that was
    revoked from a silent holder, and that no other got, is still its holder's."""
    is_open = row is not None and row["state"] in (State.ADMITTED, State.LEASED)
    if row is None or not is_open or (row["attempt"], row["member_id"]) != (of.attempt, request.member_id):
        return exchange.stale(
            request, f"attempt {of.attempt} of group {of.group_id} is not leased to {request.member_id}"
        )
    size = run.group_size(row["class"])
    if of.sample >= size:
        return exchange.refuse(request, f"group {of.group_id} has samples 0 to {size - 1}, not {of.sample}")
    return None


def _fault_of_order(turn: pb.EpisodeTurn, life: int, last: sqlite3.Row | None) -> str:
    """Return why a turn does not follow the newest one on record; empty where it does."""
    if turn.life != life:
        return f"life {turn.life} has not begun, the sample is in life {life}"
    if last is not None and last["last"]:
        return f"the sample was finished with turn {last['turn']}"
    next_turn = 0 if last is None else last["turn"] + 1
    return "" if turn.index == next_turn else f"turn {next_turn} comes next"


def _fault_of_row(run: ActiveRun, turn: UploadedTurn, num_rows: int, row_tokens: int) -> str:
    """Return why a turn cannot extend its row; empty where it can."""
    if turn.row_index > num_rows:
        return f"row {turn.row_index} is neither one of the sample's {num_rows} rows nor the next"
    if turn.row_index == num_rows and not turn.num_context:
        return f"context_ids is empty, but turn begins row {num_rows}, whose prompt has at least one token"
    longest = run.spec.policy.max_total_sequence_length
    if row_tokens > longest:
        return f"its row has {row_tokens} tokens, more than policy.max_total_sequence_length {longest}"
    return ""


def _name(of: pb.EpisodeTurn | pb.EpisodeEnd) -> str:
    return f"sample {of.sample} of group {of.group_id}"
