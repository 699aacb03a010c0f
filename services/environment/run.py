"""Runs an environment worker's part of one run: leases groups, runs their episodes, and submits the results.

Order of waiting: the lease loop waits for room or for the exchange. The task of a group waits for its episodes (which
wait for rollout workers, user code and the exchange's commits), then for the reply to its result, and keeps the group
until then.

Promise: every leased group ends in a submission, in a returned lease with the reason, or in the message that another
worker holds the lease. A fault of one group ends neither other groups nor the worker. A request is repeated until it is
answered, also over a restart of the coordinator; the exchange answers `duplicate` if it has the content already. So
each call ends with the turn recorded or the lease lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from paceline.calls.backoff import ExponentialBackoff
from paceline.environment.life import EpisodeCounts
from paceline.environment.protocols import (
    EpisodeLease,
    FinishedGroup,
    LeaseLost,
    RecordedSample,
    TokenSource,
    TurnLog,
    TurnParams,
)
from paceline.errors import InvalidInput, PacelineError, PromptTooLong, WireError, counted, error_text
from paceline.groups import Group, Version
from paceline.rate_limited_log import unforeseen
from paceline.services.common.reporting.progress_log import Occupancy, ProgressLog
from paceline.services.common.worker.membership import Membership
from paceline.services.environment.sampling_workers import (
    LeasedTokens,
    PinLost,
    RequiredWeights,
    SamplingWorkers,
    WorkersEnd,
)
from paceline.spec import RunSpec
from paceline.tracing import span
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import TurnArrays, encode_result, parse_message

LEASE_WAIT_S = 10.0
RETURN_S = 2.0
"""Seconds of a drain's grace period that are reserved for returning leases, at most half of the period."""

RunGroup = Callable[[EpisodeLease, TokenSource, TurnLog], Awaitable[FinishedGroup]]
"""Runs the episodes of a leased group (`paceline.environment.episodes.run_episodes`)."""

log = logging.getLogger(__name__)


class EnvironmentRun:
    """Leases and episodes of one run."""

    def __init__(
        self,
        spec: RunSpec,
        run_id: str,
        membership: Membership,
        workers: SamplingWorkers,
        run_group: RunGroup,
        max_samples: int,
        counts: EpisodeCounts,
    ):
        """`max_samples` limits concurrent episodes; a larger group runs alone. `counts` are sums of the run's episodes."""
        self.spec, self.run_id, self.workers = spec, run_id, workers
        self._membership = membership
        self._run_group = run_group
        self._max_samples, self._counts = max_samples, counts
        self._groups: dict[int, asyncio.Task[None]] = {}
        """The task of each leased group, until the exchange has answered its result."""
        self._sizes: dict[int, int] = {}
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = asyncio.Event()
        self.refused_pause = ExponentialBackoff()
        """Back-off before the next lease request after a refusal by the exchange."""
        self._progress = ProgressLog(log)
        self.pace = TurnPace()
        self._occupancy = Occupancy()

    @property
    def num_leases(self) -> int:
        return len(self._groups)

    @property
    def num_samples(self) -> int:
        return sum(self._sizes.values())

    def gauges(self) -> dict[str, float]:
        return {
            **self.pace.gauges(),
            "running": float(self.num_samples),
            "occupied": self._occupancy.take(),
            "leases": float(self.num_leases),
            "engines": float(len(self.workers.list)),
            "broken_turns": float(self.workers.num_broken),
            "moved_sessions": float(self.workers.list.num_moved),
            "bridge_breaks": float(self._counts.bridge_breaks),
            "tool_errors": float(self._counts.tool_errors),
            "failed_lives": float(self._counts.failures),
            "replayed_lives": float(self._counts.replayed),
            "restored_lives": float(self._counts.restored),
            "restarted_lives": float(self._counts.restarted),
        }

    async def work(self) -> None:
        """Lease groups and run their episodes until cancelled, or until all leases have ended after `drain`."""
        async with asyncio.TaskGroup() as tasks:
            await self._lease_forever(tasks)

    async def drain(self, grace_s: float) -> int:
        """Lease nothing more, let episodes end, then return the remaining leases; their finished turns are in the
        ledger. Return the number of returned leases. Takes at most `grace_s` seconds."""
        self._draining.set()
        self._room.set()
        return_s = min(RETURN_S, grace_s / 2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s - return_s):
                await self._idle.wait()
            return 0
        left = list(self._groups.values())
        for task in left:
            task.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(return_s):
                await self._idle.wait()
        return len(left)

    # Leases

    async def _lease_forever(self, tasks: asyncio.TaskGroup) -> None:
        group_size = self.spec.grpo.num_generations_per_prompt
        while not self._draining.is_set():
            room = self._max_samples - self.num_samples
            if room < group_size and self._groups:
                self._room.clear()
                await self._room.wait()  # set at the end of every group
                continue
            held = pb.Held(group_ids=self._groups)
            request = pb.ExchangeRequest(
                run_id=self.run_id, lease=pb.LeaseRequest(room=max(room, 1), wait_s=LEASE_WAIT_S, held=held)
            )
            reply, payloads = await self._membership.request(request)
            if reply.status == pb.REPLY_STATUS_STALE:
                return  # the run is over; the next assignment is on its way
            if reply.status == pb.REPLY_STATUS_INVALID:
                await self._pause_requests(reply.message)
                continue
            self.refused_pause.reset()
            for lease in reply.lease.leases:
                await self._end_earlier(lease.group_id)
                self._take(tasks, lease, payloads)

    async def _pause_requests(self, refusal: str) -> None:
        pause_s = self.refused_pause.next_s()
        log.error("the exchange refused the lease request, retrying in %.0f s: %s", pause_s, refusal)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await self._draining.wait()

    async def _end_earlier(self, group_id: int) -> None:
        """End this worker's earlier attempt at a group that it leases again: the turn log belongs to the new attempt."""
        if (task := self._groups.get(group_id)) is not None:
            log.warning(
                "group %d is leased to this worker again: its episodes continue from the recorded turns", group_id
            )
            task.cancel()
            await asyncio.wait((task,))

    def _take(self, tasks: asyncio.TaskGroup, lease: pb.Lease, payloads: Sequence[bytes]) -> None:
        task = tasks.create_task(self._work_on(lease, payloads))
        self._groups[lease.group_id] = task
        self._sizes[lease.group_id] = lease.num_generations
        self._occupancy.note(self.num_samples, self._max_samples)
        self._idle.clear()
        task.add_done_callback(lambda _: self._release(lease.group_id, task))

    def _release(self, group_id: int, task: asyncio.Task[None]) -> None:
        if self._groups.get(group_id) is task:
            del self._groups[group_id], self._sizes[group_id]
            self._occupancy.note(self.num_samples, self._max_samples)
        self._room.set()
        if not self._groups:
            self._idle.set()

    # One group

    async def _work_on(self, lease: pb.Lease, payloads: Sequence[bytes]) -> None:
        started_s = time.monotonic()
        required = required_by(lease, self.spec.async_grpo.max_trajectory_age_steps)
        tokens = LeasedTokens(self.workers, required, self.pace.note)
        turn_log = LeasedTurnLog(self._membership, self.run_id, lease.group_id, lease.attempt)
        try:
            with span("episodes", lease.traceparent, group_id=lease.group_id, attempt=lease.attempt):
                rows = await self._run_group(read_lease(lease, payloads), tokens, turn_log)
            await self._submit(lease, rows, time.monotonic() - started_s)
        except asyncio.CancelledError:
            if not self._draining.is_set():
                raise
            await self._return_lease(lease)  # another worker continues from the recorded turns
        except LeaseLost as lost:
            await self._on_lost(lease, lost)
        except InvalidInput as error:
            reason = "prompt_too_long" if isinstance(error, PromptTooLong) else "bad_prompt"
            await self._return_lease(lease, str(error), reason)
        except Exception as error:
            if not isinstance(error, PacelineError):
                unforeseen.note("the episodes of a group", error)
            await self._return_lease(lease, error_text(error), "")
        finally:
            tokens.close()

    async def _on_lost(self, lease: pb.Lease, lost: LeaseLost) -> None:
        """Return a lease that cannot continue on this worker. If another worker holds it, do nothing."""
        match lost:
            case PinLost():
                log.warning("returning group %d: %s", lease.group_id, lost)
                await self._return_lease(lease)
            case WorkersEnd():
                await self._return_lease(lease, str(lost), "")
            case LeaseRefused():
                await self._return_lease(lease, str(lost), "invalid_result")
            case _:
                log.info("%s", lost)

    async def _submit(self, lease: pb.Lease, rows: FinishedGroup, generate_s: float) -> None:
        if not rows.completions:
            detail = next((sample.detail for sample in rows.samples if sample.detail), "no sample has a turn")
            await self._return_lease(lease, detail, "environment_failed")
            return
        group = Group(lease.group_id, rows.prompt_ids, tuple(rows.completions), rows=rows.rows)
        result = pb.GroupResult(
            group_id=lease.group_id, attempt=lease.attempt, digest=group.digest(), generate_s=generate_s
        )
        request = pb.ExchangeRequest(run_id=self.run_id, group=result)
        frames = encode_result(rows.prompt_ids, rows.completions, rows.rows, rows.samples)
        reply, _ = await self._membership.request(request, frames)
        if reply.status == pb.REPLY_STATUS_INVALID:
            log.error("group %d was refused: %s", lease.group_id, reply.message)
            await self._return_lease(lease, reply.message, "invalid_result")
            return
        self._progress.note(
            lambda sums, s: (
                f"run {self.run_id}: {counted(sums['groups'], 'group')} with {counted(sums['turns'], 'turn')} and "
                f"{counted(sums['tokens'], 'token')} in {s:.0f} s"
            ),
            groups=1,
            turns=len(rows.rows.turns),
            tokens=group.num_tokens,
        )

    async def _return_lease(self, lease: pb.Lease, error: str = "", reason: str = "") -> None:
        """Return a lease; its turns stay in the ledger. An `error` counts as a failure; some reasons make the failure
        final."""
        returned = pb.LeaseReturn(
            group_id=lease.group_id,
            attempt=lease.attempt,
            data_error=error[:MAX_ERROR_CHARS],
            data_error_reason=reason if error else "",
        )
        if error:
            log.error("returning group %d: %s", lease.group_id, error)
        await self._membership.request(pb.ExchangeRequest(run_id=self.run_id, lease_return=returned))


RECORDED = (pb.REPLY_STATUS_COMMITTED, pb.REPLY_STATUS_DUPLICATE)
MAX_ERROR_CHARS = 2000


class LeaseRefused(LeaseLost):
    """The exchange refuses a turn of this lease for good. The lease is returned with the reason."""


class LeasedTurnLog:
    """`TurnLog` of one leased group."""

    def __init__(self, membership: Membership, run_id: str, group_id: int, attempt: int):
        self._membership, self._run_id = membership, run_id
        self._group_id, self._attempt = group_id, attempt

    async def turn(self, sample: int, life: int, index: int, arrays: TurnArrays, note: pb.TurnNote, last: bool) -> None:
        turn = pb.EpisodeTurn(
            group_id=self._group_id, attempt=self._attempt, sample=sample, life=life, index=index, last=last
        )
        frames = [arrays.encode(), note.SerializeToString()]
        await self._record(pb.ExchangeRequest(run_id=self._run_id, turn=turn), frames)

    async def end(self, sample: int, life: int, reason: str, error: str, give_up: bool) -> None:
        end = pb.EpisodeEnd(
            group_id=self._group_id,
            attempt=self._attempt,
            sample=sample,
            life=life,
            reason=reason,
            error=error[:MAX_ERROR_CHARS],
            give_up=give_up,
        )
        await self._record(pb.ExchangeRequest(run_id=self._run_id, episode_end=end), [])

    async def _record(self, request: pb.ExchangeRequest, frames: list[bytes]) -> None:
        reply, _ = await self._membership.request(request, frames)
        if reply.status in RECORDED:
            return
        group = f"group {self._group_id}, attempt {self._attempt}"
        if reply.status == pb.REPLY_STATUS_STALE:
            raise LeaseLost(f"{group}: {reply.message or 'another worker holds the lease'}")
        raise LeaseRefused(f"{group}: the exchange refuses the turn: {reply.message}")


def read_lease(lease: pb.Lease, payloads: Sequence[bytes]) -> EpisodeLease:
    """Return the group of a lease with its recorded turns. Raises WireError."""
    try:
        prompt, columns = json.loads(lease.prompt_json), json.loads(lease.columns_json or "{}")
    except ValueError as error:
        raise WireError(f"prompt or columns of group {lease.group_id} are not JSON: {error}") from None
    if not isinstance(columns, dict):
        raise WireError(f"columns of group {lease.group_id} are {type(columns).__name__}, but must be an object")
    return EpisodeLease(
        group_id=lease.group_id,
        attempt=lease.attempt,
        prompt=prompt,
        columns=columns,
        num_samples=lease.num_generations,
        seed=lease.seed,
        params=TurnParams.of(lease.params),
        recorded={record.sample: _read_recorded(record, payloads) for record in lease.journal},
    )


def required_by(lease: pb.Lease, max_age: int) -> RequiredWeights:
    """Return the weights that a lease requires: at most η steps older than the step of the lease."""
    if lease.HasField("pinned_version"):
        pinned = Version(lease.pinned_version.session, lease.pinned_version.step)
        return RequiredWeights(pinned=pinned, pinned_member=lease.pinned_member)
    return RequiredWeights(oldest_step=max(0, lease.step - max_age))


def _read_recorded(record: pb.EpisodeJournal, payloads: Sequence[bytes]) -> RecordedSample:
    if len(record.arrays_frames) != len(record.note_frames):
        raise WireError(
            f"sample {record.sample} has {len(record.arrays_frames)} turns, but {len(record.note_frames)} notes"
        )
    turns = []
    for arrays, note in zip(record.arrays_frames, record.note_frames, strict=True):
        if not (0 < arrays <= len(payloads) and 0 < note <= len(payloads)):
            raise WireError(
                f"sample {record.sample} names frames {arrays} and {note}, but the message has {len(payloads)} frames"
            )
        turns.append((TurnArrays.decode(payloads[arrays - 1]), parse_message(pb.TurnNote, payloads[note - 1])))
    return RecordedSample(record.life, record.failures, record.finished, record.given_up, tuple(turns))


class TurnPace:
    """Counts the turns since the last heartbeat."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._turns = self._tokens = 0
        self._since_s = clock()

    def note(self, num_tokens: int) -> None:
        self._turns += 1
        self._tokens += num_tokens

    def gauges(self) -> dict[str, float]:
        now_s = self._clock()
        elapsed_s = max(now_s - self._since_s, 1e-6)
        turns, tokens = self._turns, self._tokens
        self._turns, self._tokens, self._since_s = 0, 0, now_s
        return {"turns_per_s": turns / elapsed_s, "tokens_per_s": tokens / elapsed_s}
