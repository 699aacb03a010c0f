"""The end of an unfinished life of a sample: its tokens are dropped, and a new life begins unless the sample is given up."""

from __future__ import annotations

import sqlite3

from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.replies import Outcome, committed, duplicate, refuse
from paceline.services.coordinator.exchange.requests.turn import refusal_of_holder, sample_name
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange, class_of
from paceline.services.coordinator.exchange.turn_logs import end_life
from paceline.services.coordinator.exchange.uploads.intake import Arrived
from paceline.services.coordinator.ledger.tables.episodes import FAILED, RESTARTED
from paceline.services.coordinator.text_limits import cut
from paceline.v1 import exchange_pb2 as pb

REASONS = (RESTARTED, FAILED)


def answer(exchange: Exchange, run: ActiveRun, arrived: Arrived, now_s: float) -> Outcome:
    request, end, episodes = arrived.request, arrived.request.episode_end, exchange.ledger.episodes
    row = exchange.group_queries.get(run.run_id, end.group_id)
    if (refusal := refusal_of_holder(exchange, run, request, row, end)) is not None:
        return refusal
    assert row is not None
    if end.reason not in REASONS or (end.give_up and end.reason != FAILED):
        return refuse(
            request,
            f"reason is {end.reason[:64]!r} with give_up {str(end.give_up).lower()}, but must be "
            f"{' or '.join(REASONS)}; with give_up it must be {FAILED}",
        )
    lives = episodes.lives(run.run_id, end.group_id, end.sample)
    if end.life < lives.current:
        return duplicate(request, f"life {end.life} of {sample_name(end)} has ended already")
    last = episodes.last_turn(run.run_id, end.group_id, end.sample, lives.current)
    if end.life != lives.current or (last is not None and last["last"]):
        why = "the sample is finished" if end.life == lives.current else f"the sample is in life {lives.current}"
        return refuse(request, f"life {end.life} of {sample_name(end)} cannot end: {why}")
    end_life(exchange, run, row, end.sample, end.reason, cut(end.error), give_up=end.give_up)
    if end.reason == FAILED:
        _note_failure(exchange, run, row, end, lives.failures + 1)
    exchange.workers.lease_durations.note_progress(request.member_id)
    return committed(request)


def _note_failure(exchange: Exchange, run: ActiveRun, row: sqlite3.Row, end: pb.EpisodeEnd, failures: int) -> None:
    exchange.ledger.count(run.run_id, f"failures:{FAILED}")
    error, allowed = cut(end.error), run.spec.environment.max_failures
    if not end.give_up:
        if run.state.failure_counts.failed(error):
            exchange.notices.warn(
                f"{sample_name(end)} failed in its environment ({failures} of {allowed}) and begins again: {error}"
            )
        return
    lives = exchange.ledger.episodes.lives_of_group(run.run_id, row["group_id"])
    size = class_of(row).size(run)
    if sum(sample.given_up for sample in lives.values()) < size:
        if number := run.state.failure_counts.dropped(error):
            alike = f", the {number}th for this cause" if number > 1 else ""
            exchange.notices.warn(f"{sample_name(end)} was given up{alike}; its group continues without it: {error}")
        return
    exchange.note_failure(run, row, "running", FAILED, error, failures, failures)
    evaluation.drop(exchange, run, exchange.group_queries.get(run.run_id, row["group_id"]) or row, FAILED, error)
