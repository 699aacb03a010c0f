"""Ends of samples' lives: what a life has journaled leaves the group, and its tokens are dropped."""

from __future__ import annotations

import sqlite3

from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.ledger.tables.episodes import FAILED, EndedLife


def end_life(
    exchange: Exchange,
    run: ActiveRun,
    row: sqlite3.Row,
    sample: int,
    reason: str,
    error: str,
    *,
    give_up: bool = False,
) -> None:
    """End the current life of a sample of an open group: its turns are removed, and its tokens dropped for `reason`."""
    ledger, run_id, group_id = exchange.ledger, run.run_id, row["group_id"]
    lives = ledger.episodes.lives(run_id, group_id, sample)
    turns = [turn for turn in ledger.episodes.of_group(run_id, group_id) if turn["sample"] == sample]
    tokens = sum(turn["tokens"] for turn in turns)
    ended = EndedLife(
        run_id,
        group_id,
        sample,
        lives.current,
        reason,
        error,
        len(turns),
        tokens,
        given_up=give_up,
        counts=reason == FAILED,
    )
    ledger.note_removed_records(ledger.episodes.end(ended))
    exchange.groups.set_journal(run_id, group_id, *ledger.episodes.total(run_id, group_id))
    if row["class"] == "train":
        ledger.count(run_id, f"tokens:dropped:{reason}", tokens)
