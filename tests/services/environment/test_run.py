"""An environment worker's run with a scripted exchange: leases, submissions, returns and drains."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from exchange_drivers import make_spec

from paceline.calls.backoff import ExponentialBackoff
from paceline.environment.life import EpisodeCounts
from paceline.environment.protocols import EpisodeLease, FinishedGroup, LeaseLost, TokenSource, TurnLog
from paceline.errors import InvalidInput, PromptTooLong
from paceline.groups import Completion, Group, Rows, Turn, VersionSpan
from paceline.services.environment.run import EnvironmentRun
from paceline.services.environment.sampling_workers import PinLost, SamplingWorkers, WorkersEnd
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import CompletionArrays, TurnArrays, decode_completions, parse_message, split_rows

PATIENCE_S = 60.0
RUN = "run-1"
Script = Callable[[EpisodeLease, TokenSource, TurnLog], Awaitable[FinishedGroup]]


class Exchange:
    """Exchange that gives the leases in `leases`, commits every record, and keeps all requests."""

    def __init__(self) -> None:
        self.leases: asyncio.Queue[list[pb.Lease] | pb.ReplyStatus] = asyncio.Queue()
        """A status stands for a reply without leases."""
        self.requests: list[pb.LeaseRequest] = []
        self.ends: asyncio.Queue[Any] = asyncio.Queue()
        """Submitted groups with their payloads, and returned leases."""
        self.records: list[pb.EpisodeTurn | pb.EpisodeEnd] = []
        self.status: dict[str, Any] = {}

    async def request(self, request: pb.ExchangeRequest, payloads: Any = ()) -> Any:
        kind = request.WhichOneof("body")
        assert kind is not None
        body = getattr(request, kind)
        if kind == "lease":
            self.requests.append(body)
            given = await self.leases.get()
            if isinstance(given, int):
                return pb.ExchangeReply(status=given, message="failed on it"), []
            return pb.ExchangeReply(status=pb.REPLY_STATUS_OK, lease=pb.LeaseReply(leases=given)), []
        if kind in ("group", "lease_return"):
            self.ends.put_nowait((body, list(payloads)) if kind == "group" else body)
        else:
            self.records.append(body)
        status = self.status.get(kind, pb.REPLY_STATUS_COMMITTED)
        return pb.ExchangeReply(status=status, message="not this one"), []

    async def next(self) -> Any:
        return await asyncio.wait_for(self.ends.get(), PATIENCE_S)


def lease(group_id: int, attempt: int = 1, **fields: Any) -> pb.Lease:
    params = {"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0}
    return pb.Lease(
        group_id=group_id, attempt=attempt, prompt_json=json.dumps(f"p{group_id}"), columns_json='{"answer": 1}',
        num_generations=2, params=params, **fields,
    )  # fmt: skip


def rows_of(num_samples: int = 2) -> FinishedGroup:
    prompt = np.array([1, 2], np.int32)
    row = Completion(
        np.array([3, 9, 4], np.int32), np.array([-1, 0, -2], np.float32),
        (VersionSpan(1, 0, 0, 1), VersionSpan(1, 0, 2, 3)), "stop", "three", prompt_ids=prompt,
        sampled_T=np.array([True, False, True]),
    )  # fmt: skip
    turns = [Turn(row, at, at + 1, float("nan")) for row in range(num_samples) for at in (0, 2)]
    return FinishedGroup(
        prompt, [row] * num_samples, Rows(2, tuple(range(num_samples)), tuple(turns)),
        [pb.SampleText(messages_json="[]", ending="done")] * 2,
    )  # fmt: skip


class Bench:
    """A run at work with a scripted exchange and scripted episodes."""

    def __init__(self, directory: Path) -> None:
        self.exchange, self.workers = Exchange(), SamplingWorkers(RUN)
        self.script: Script = self._at_once
        self.began: asyncio.Queue[EpisodeLease] = asyncio.Queue()
        self.held = asyncio.Event()
        membership: Any = self.exchange
        spec = make_spec(directory, environment={"class": "env.py:Env"})
        self.run = EnvironmentRun(spec, RUN, membership, self.workers, self._run_group, 4, EpisodeCounts())
        self.working = asyncio.create_task(self.run.work())

    async def _run_group(self, group: EpisodeLease, tokens: TokenSource, journal: TurnLog) -> FinishedGroup:
        self.began.put_nowait(group)
        return await self.script(group, tokens, journal)

    async def _at_once(self, *_: object) -> FinishedGroup:
        return rows_of()

    async def until_held(self, *_: object) -> FinishedGroup:
        await self.held.wait()
        return rows_of()

    async def next_begun(self) -> EpisodeLease:
        return await asyncio.wait_for(self.began.get(), PATIENCE_S)


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.working.cancel()
    await asyncio.wait((bench.working,))


async def test_a_group_is_submitted_with_its_rows_and_texts(bench: Bench) -> None:
    bench.exchange.leases.put_nowait([lease(7, seed=5)])
    result, payloads = await bench.exchange.next()
    group = await bench.next_begun()
    assert (group.prompt, group.columns, group.num_samples, group.seed) == ("p7", {"answer": 1}, 2, 5)
    arrays = CompletionArrays.of(payloads[0])
    prompt_ids, completions = decode_completions(payloads[0], ["stop"] * 2, [""] * 2)
    sent = Group(7, prompt_ids, completions, rows=split_rows(arrays, completions))
    assert (result.group_id, result.attempt, result.digest) == (7, 1, sent.digest())
    assert sent.num_tokens == 4
    texts = parse_message(pb.Texts, payloads[1])
    assert [sample.ending for sample in texts.samples] == ["done", "done"]
    assert list(texts.texts) == ["three", "three"]


async def test_leases_are_requested_while_there_is_room(bench: Bench) -> None:
    bench.script = bench.until_held
    bench.exchange.leases.put_nowait([lease(0)])
    bench.exchange.leases.put_nowait([lease(1)])
    for _ in range(2):
        await bench.next_begun()
    assert [(request.room, list(request.held.group_ids)) for request in bench.exchange.requests] == [
        (4, []), (2, [0]),
    ]  # fmt: skip
    assert bench.run.gauges()["running"] == 4.0
    bench.held.set()
    for _ in range(2):
        await bench.exchange.next()
    bench.exchange.leases.put_nowait([])
    bench.exchange.leases.put_nowait(pb.REPLY_STATUS_STALE)
    await asyncio.wait_for(bench.working, PATIENCE_S)
    assert bench.exchange.requests[-1].room == 4
    assert bench.run.num_leases == 0


@pytest.mark.parametrize(
    ("error", "reason", "words"),
    [
        (InvalidInput("the chat template refuses it"), "bad_prompt", "the chat template refuses it"),
        (PromptTooLong("the prompt has 90 tokens"), "prompt_too_long", "90 tokens"),
        (PinLost("worker a is gone"), "", ""),
        (WorkersEnd("4 answers broke"), "", "4 answers broke"),
        (ZeroDivisionError("division by zero"), "", "ZeroDivisionError: division by zero"),
    ],
)
async def test_a_group_that_cannot_go_on_is_returned_with_the_reason(
    bench: Bench, error: Exception, reason: str, words: str
) -> None:
    async def fail(*_: object) -> FinishedGroup:
        raise error

    bench.script = fail
    bench.exchange.leases.put_nowait([lease(0)])
    back = await bench.exchange.next()
    assert back.data_error_reason == reason
    assert words in back.data_error
    assert bool(back.data_error) == bool(words)
    bench.script = bench._at_once
    bench.exchange.leases.put_nowait([lease(1)])
    assert (await bench.exchange.next())[0].group_id == 1
    assert not bench.working.done()


async def test_a_lease_that_another_worker_holds_ends_in_silence(bench: Bench) -> None:
    async def turn(group: EpisodeLease, tokens: TokenSource, journal: TurnLog) -> FinishedGroup:
        span = (VersionSpan(1, 0, 0, 1),)
        arrays = TurnArrays(0, np.array([1], np.int32), np.array([2], np.int32), np.zeros(1, np.float32), span)
        await journal.turn(0, 1, 0, arrays, pb.TurnNote(text="two"), last=False)
        raise AssertionError("the record was stale")

    bench.script = turn
    bench.exchange.status["turn"] = pb.REPLY_STATUS_STALE
    bench.exchange.leases.put_nowait([lease(0)])
    await bench.next_begun()
    bench.script = bench._at_once
    bench.exchange.leases.put_nowait([lease(1)])
    assert (await bench.exchange.next())[0].group_id == 1, "nothing was sent for group 0"
    (record,) = bench.exchange.records
    assert (record.group_id, record.attempt, record.sample, record.life) == (0, 1, 0, 1)


@pytest.mark.parametrize("kind", ["turn", "episode_end"])
async def test_a_record_that_the_exchange_refuses_for_good_returns_the_lease(bench: Bench, kind: str) -> None:
    async def record(group: EpisodeLease, tokens: TokenSource, journal: TurnLog) -> FinishedGroup:
        span = (VersionSpan(1, 0, 0, 1),)
        arrays = TurnArrays(0, np.array([1], np.int32), np.array([2], np.int32), np.zeros(1, np.float32), span)
        await journal.turn(0, 1, 0, arrays, pb.TurnNote(text="two"), last=False)
        await journal.end(0, 1, "environment_failed", "it raised", give_up=False)
        raise AssertionError("a record was refused")

    bench.script = record
    bench.exchange.status[kind] = pb.REPLY_STATUS_INVALID
    bench.exchange.leases.put_nowait([lease(0)])
    back = await bench.exchange.next()
    assert back.data_error_reason == "invalid_result"
    assert "not this one" in back.data_error


async def test_a_result_that_the_exchange_refuses_returns_the_lease(bench: Bench) -> None:
    bench.exchange.status["group"] = pb.REPLY_STATUS_INVALID
    bench.exchange.leases.put_nowait([lease(0)])
    await bench.exchange.next()
    back = await bench.exchange.next()
    assert (back.data_error_reason, back.data_error) == ("invalid_result", "not this one")


async def test_a_group_without_any_row_is_returned_as_failed(bench: Bench) -> None:
    async def none(*_: object) -> FinishedGroup:
        failed = pb.SampleText(messages_json="[]", ending="failed", detail="reset raised KeyError: 'answer'")
        return FinishedGroup(np.zeros(0, np.int32), [], Rows(2, (), ()), [failed] * 2)

    bench.script = none
    bench.exchange.leases.put_nowait([lease(0)])
    back = await bench.exchange.next()
    assert (back.data_error_reason, back.data_error) == (
        "environment_failed",
        "reset raised KeyError: 'answer'",
    )


async def test_a_lease_with_a_journal_that_cannot_be_read_goes_back(bench: Bench) -> None:
    bench.exchange.leases.put_nowait([lease(0, journal=[pb.EpisodeJournal(arrays_frames=[1], note_frames=[2])])])
    back = await bench.exchange.next()
    assert back.data_error_reason == ""
    assert "frames 1 and 2" in back.data_error


async def test_a_group_that_is_leased_again_begins_from_its_new_journal(bench: Bench) -> None:
    bench.script = bench.until_held
    bench.exchange.leases.put_nowait([lease(0)])
    assert (await bench.next_begun()).attempt == 1
    bench.exchange.leases.put_nowait([lease(0, attempt=2, journal=[pb.EpisodeJournal(sample=1, life=3)])])
    group = await bench.next_begun()
    assert (group.attempt, group.recorded[1].life) == (2, 3)
    bench.held.set()
    result, _ = await bench.exchange.next()
    assert result.attempt == 2
    assert bench.exchange.ends.empty()


async def test_a_drain_waits_for_episodes_and_returns_the_rest(bench: Bench) -> None:
    async def script(group: EpisodeLease, *_: object) -> FinishedGroup:
        if group.group_id == 1:
            await asyncio.Event().wait()
        await bench.held.wait()
        return rows_of()

    bench.script = script
    bench.exchange.leases.put_nowait([lease(0), lease(1)])
    for _ in range(2):
        await bench.next_begun()
    draining = asyncio.create_task(bench.run.drain(2.0))
    bench.held.set()
    result, _ = await bench.exchange.next()
    assert result.group_id == 0
    back = await bench.exchange.next()
    assert (back.group_id, back.data_error, back.data_error_reason) == (1, "", "")
    assert await asyncio.wait_for(draining, PATIENCE_S) == 1
    assert bench.run.num_leases == 0


async def test_a_request_for_leases_that_is_refused_ends_nothing(bench: Bench) -> None:
    bench.run.refused_pause = ExponentialBackoff(0.0, 0.0)
    for _ in range(3):
        bench.exchange.leases.put_nowait(pb.REPLY_STATUS_INVALID)
    bench.exchange.leases.put_nowait([lease(1)])
    assert (await bench.exchange.next())[0].group_id == 1


async def test_the_end_of_a_run_ends_its_episodes(bench: Bench) -> None:
    ended = asyncio.Event()

    async def forever(*_: object) -> FinishedGroup:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    bench.script = forever
    bench.exchange.leases.put_nowait([lease(0)])
    await bench.next_begun()
    bench.working.cancel()
    await asyncio.wait((bench.working,))
    assert ended.is_set()
    assert bench.exchange.ends.empty()


def test_every_way_to_lose_a_lease_is_one() -> None:
    assert issubclass(PinLost, LeaseLost)
    assert issubclass(WorkersEnd, LeaseLost)
