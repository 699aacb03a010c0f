"""A turn of an episode, committed once, by the attempt that holds its group, in the order of its sample's turns. While
a group is open, its row counts the tokens of its logged turns, so the token accounting balances after every turn."""

from __future__ import annotations

import json
import sqlite3

from paceline.errors import WireError
from paceline.groups import Version
from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.replies import Outcome, committed, duplicate, refuse, stale
from paceline.services.coordinator.exchange.result_checks import fault_of_ids, fault_of_versions
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange, class_of
from paceline.services.coordinator.exchange.uploads.intake import (
    ENDINGS,
    FINISHED,
    Arrived,
    UploadedTurn,
    check_ids,
    check_logprobs,
    check_number,
    context_digest,
    turn_digest,
)
from paceline.services.coordinator.ledger.groups import State
from paceline.services.coordinator.ledger.segments import Record
from paceline.services.coordinator.ledger.tables.episodes import FinishedTurn
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import MAX_NOTE_BYTES, TurnArrays, parse_message


def answer(exchange: Exchange, run: ActiveRun, arrived: Arrived, now_s: float) -> Outcome:
    request, turn, episodes = arrived.request, arrived.request.turn, exchange.ledger.episodes
    row = exchange.group_queries.get(run.run_id, turn.group_id)
    if (refusal := refusal_of_holder(exchange, run, request, row, turn)) is not None:
        return refusal
    assert row is not None
    group_class, lives = class_of(row), episodes.lives(run.run_id, turn.group_id, turn.sample)
    if turn.life < lives.current or lives.given_up:
        return stale(request, f"life {turn.life} of {sample_name(turn)} has ended")
    last = episodes.last_turn(run.run_id, turn.group_id, turn.sample, lives.current)
    next_turn = 0 if last is None else last["turn"] + 1
    if turn.life == lives.current and turn.index < next_turn:
        return duplicate(request, f"turn {turn.index} of {sample_name(turn)} is in the ledger already")
    if arrived.is_decided:  # it was when the turn arrived; since then its life has ended
        gone = f"turn {turn.index} of {sample_name(turn)} is not in the ledger any more"
        return stale(request, f"{gone}; the next turn must be {next_turn}")
    uploaded = arrived.turn
    if uploaded is None or arrived.location is None:
        return refuse(request, arrived.fault)
    if not group_class.trains and uploaded.versions != {evaluation.pinned_version(exchange, run, row)}:
        return stale(request, f"{sample_name(turn)} has tokens of another version than its evaluation")
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
        return refuse(request, f"turn {turn.index} of {sample_name(turn)}: {fault}")
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
    exchange.workers.throughput.add_tokens(uploaded.num_tokens, turns=1)
    group_class.count(exchange, run, "tokens:generated", uploaded.num_tokens)
    exchange.workers.lease_durations.note_progress(request.member_id)
    return committed(request)


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


def refusal_of_holder(
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
        return stale(request, f"{attempt} is not leased to {request.member_id}")
    size = class_of(row).size(run)
    if of.sample >= size:
        return refuse(request, f"group {of.group_id} has samples 0 to {size - 1}, not {of.sample}")
    return None


def sample_name(of: pb.EpisodeTurn | pb.EpisodeEnd) -> str:
    return f"sample {of.sample} of group {of.group_id}"


def check(arrived: Arrived) -> Record:
    """Set the parts of a turn that the ledger keeps, and return its record. Raises WireError."""
    turn, frames, limits = arrived.request.turn, arrived.frames, arrived.limits
    if len(frames) != 2:
        raise WireError(f"a turn has two payload frames, not {len(frames)}")
    if len(frames[1]) > MAX_NOTE_BYTES:
        raise WireError(
            f"the note of a turn has {len(frames[1])} bytes, but {MAX_NOTE_BYTES} are allowed; a large part may "
            "be the state that the environment's `save` returns"
        )
    arrays, note = TurnArrays.decode(frames[0]), parse_message(pb.TurnNote, frames[1])
    max_id = max(check_ids("context_ids", arrays.context_ids), check_ids("token_ids", arrays.token_ids))
    check_logprobs("logprobs", arrays.logprobs)
    if limits is not None and len(arrays.token_ids) > limits.max_new_tokens:
        raise WireError(
            f"a turn of {len(arrays.token_ids)} tokens is longer than policy.generation.max_new_tokens "
            f"{limits.max_new_tokens}"
        )
    if note.finish_reason not in FINISHED:
        raise WireError(f"finish_reason is {note.finish_reason[:64]!r}, but must be one of {', '.join(FINISHED)}")
    check_number("reward", note.reward)
    _check_sample(turn, note)
    arrived.turn = UploadedTurn(
        arrays.row,
        len(arrays.context_ids),
        len(arrays.token_ids),
        max_id,
        frozenset(Version(*span[:2]) for span in arrays.spans),
        turn_digest(arrays.token_ids, arrays.logprobs, arrays.spans),
        context_digest(arrays.context_ids),
        tuple(sorted(note.left_out)),
    )
    return Record.of(frames[1], frames[0])


def _check_sample(turn: pb.EpisodeTurn, note: pb.TurnNote) -> None:
    """Check the fields that only the last turn may set. Raises WireError."""
    if note.HasField("sample") != turn.last:
        raise WireError("`sample` must be set in the last turn of a sample, and in no other turn")
    if not turn.last:
        if note.left_out:
            raise WireError("only the last turn of a sample names turns in `left_out`")
        return
    if note.sample.ending not in ENDINGS:
        raise WireError(f"ending is {note.sample.ending[:64]!r}, but must be one of {', '.join(ENDINGS)}")
    check_number("sample.reward", note.sample.reward)
    check_number("sample.turn_rewards", note.sample.turn_rewards)
    if len(set(note.left_out)) != len(note.left_out) or max(note.left_out, default=0) > turn.index:
        raise WireError(
            f"left_out is {list(note.left_out[:16])}, but must name turns from 0 to {turn.index}, each once"
        )
    if len(note.left_out) > turn.index:
        raise WireError(f"left_out names all {turn.index + 1} turns, but at least one must be trained")


def is_decided(exchange: Exchange, run: ActiveRun, request: pb.ExchangeRequest, row: sqlite3.Row) -> bool:
    turn = request.turn
    last = exchange.ledger.episodes.last_turn(run.run_id, turn.group_id, turn.sample, turn.life)
    return last is not None and bool(last["turn"] >= turn.index)
