"""A rollout worker's work on one run: requests leases while there is room, generates the groups, and submits them.

Order of waiting: the lease loop waits for room or for the exchange; each group's task waits for its samples and then
for the exchange's reply, and keeps the group until then. New weights arrive independently
(`services/rollout/weights.py`). In a run with an environment this worker has no leases: it samples the turns that
environment workers request (`services/rollout/servicer.py`).

A lease has no deadline, because a long completion is no fault. Heartbeats do not show a hang, because they continue
while an engine hangs. So a hang probe submits a request of one token and aborts it at once. Any engine that does not
hang answers the probe between two decode steps, however long its queue is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.calls.backoff import ExponentialBackoff
from paceline.data.tokens import load_tokenizer
from paceline.errors import InvalidInput, PacelineError, PromptTooLong, Unavailable, counted, error_text
from paceline.groups import Completion, Group, IntArray
from paceline.models.loading import named_size
from paceline.rollout.engine import Engine, GenerationRequest, SamplingParams
from paceline.rollout.engines import create_engine
from paceline.services.common.reporting.progress_log import Occupancy, ProgressLog
from paceline.services.common.worker.membership import Membership
from paceline.services.rollout.group_sampler import GroupSampler, Pace, TemplateFile
from paceline.services.rollout.weights import RolloutWeights
from paceline.spec import RunSpec
from paceline.tracing import span
from paceline.v1 import exchange_pb2 as pb
from paceline.v1 import worker_pb2
from paceline.weights.hosts.client import RelayClient
from paceline.weights.store.store_format import run_store
from paceline.wire import encode_completions, encode_result

LEASE_WAIT_S = 10.0
RETURN_S = 5.0
"""Seconds of a drain's grace for the return of unfinished groups, in addition to the time of their upload."""
RETURN_BYTES_PER_S = 8 << 20
"""Upload rate of one worker while many workers drain, in bytes a second."""
TOKEN_BYTES = 8
"""Bytes of a token's id and its log-probability."""
MAX_UNEXPECTED = 4
"""Number of unexpected errors in a row that count as faults of groups; the next error is a fault of the worker."""
PROBE_S = 30.0
MAX_ERROR_CHARS = 2000
CAPACITY_S = 0.5
"""Seconds between two checks of the engine's capacity while there is no room."""
log = logging.getLogger(__name__)


class RolloutRun:
    """Engine, tokenizer and weights of one run."""

    def __init__(
        self,
        spec: RunSpec,
        run_id: str,
        member_id: str,
        membership: Membership,
        engine: Engine,
        tokenizer: Any,
        directory: str,
        relay: RelayClient | None = None,
    ):
        self.spec = spec
        self.run_id = run_id
        self.engine = engine
        self.tokenizer = tokenizer
        self._template = TemplateFile(spec.policy)
        self._membership = membership
        self._running_by_group: dict[int, int] = {}
        """Number of running samples of each leased group; 0 while the group waits for the exchange's reply."""
        self._room = asyncio.Event()
        self.refused_pause = ExponentialBackoff()
        """Backoff before the next request for leases, after the exchange has refused a request."""
        self._draining = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._turns = 0
        self._turn_tokens = 0
        self._external: dict[str, None] = {}
        self._no_external = asyncio.Event()
        self._no_external.set()
        self._pace = Pace()
        self._occupancy = Occupancy()
        self._progress = ProgressLog(log)
        self._sampler = GroupSampler(engine, tokenizer, spec, member_id, self._end_sample, self._warn)
        self.params, self.stop = self._sampler.params, self._sampler.stop
        self._unexpected = 0
        store_url = run_store(spec.weights.store, run_id, directory)
        self.weights = RolloutWeights(run_id, member_id, membership, engine, spec.weights.max_wait_s, store_url, relay)

    @classmethod
    async def start(
        cls,
        spec: RunSpec,
        assignment: worker_pb2.RunAssignment,
        member_id: str,
        membership: Membership,
        device: str,
        relay: RelayClient | None = None,
    ) -> RolloutRun:
        """Load tokenizer and engine. Weights are received later, from `relay` or from the object store. Raises
        InvalidInput for a model that cannot be used, EngineDied if the engine did not start."""
        started_s = time.monotonic()
        log.info("run %s: loading %s", assignment.run_id, named_size(spec.policy.model_name))
        tokenizer = await asyncio.to_thread(load_tokenizer, spec.policy)
        engine = await _created(spec, device)
        try:
            await engine.ready()
        except BaseException:
            await engine.close()
            raise
        log.info("run %s: the engine is ready after %.1f s", assignment.run_id, time.monotonic() - started_s)
        return cls(spec, assignment.run_id, member_id, membership, engine, tokenizer, assignment.directory, relay)

    @property
    def generated_tokens(self) -> int:
        """Return the number of tokens that this worker has generated for leases of the run and turns of its episodes."""
        return self._sampler.generated_tokens + self._turn_tokens

    @property
    def draining(self) -> bool:
        """Return whether `drain` was called, after which no further lease is taken."""
        return self._draining.is_set()

    @property
    def num_leases(self) -> int:
        """Return the number of leases: groups that are being generated or wait for the exchange's reply."""
        return len(self._running_by_group)

    async def close(self) -> None:
        self.weights.close()
        await self.engine.close()

    async def generate_forever(self) -> None:
        """Take leases and generate, or sample turns in a run with an environment, until cancelled or drained."""
        async with asyncio.TaskGroup() as tasks:
            guard = tasks.create_task(self._end_if_hung())
            if self.spec.environment.is_used:
                await self._draining.wait()
            while not self.draining:
                group_size = self.spec.grpo.num_generations_per_prompt
                running = sum(self._running_by_group.values())
                # One group is requested ahead, so that the engine never has room without work.
                room = self.engine.capacity + group_size - running
                if room < group_size and running:
                    await self._await_room(CAPACITY_S)  # the capacity may have grown without a sample's end
                    continue
                held = pb.Held(group_ids=self._running_by_group)
                lease_request = pb.LeaseRequest(room=room, wait_s=LEASE_WAIT_S, held=held)
                request = pb.ExchangeRequest(run_id=self.run_id, lease=lease_request)
                reply, payloads = await self._membership.request(request)
                if reply.status == pb.REPLY_STATUS_STALE:
                    guard.cancel()
                    return  # the run is over; the next assignment is on its way
                if reply.status == pb.REPLY_STATUS_INVALID:
                    await self._pause_requests(reply.message)
                    continue
                self.refused_pause.reset()
                for lease in reply.lease.leases:
                    if lease.group_id in self._running_by_group:
                        continue  # leased again while it is generated here: the result of any attempt counts
                    if self.draining:
                        await self._return_lease(lease)
                        continue
                    payload = payloads[lease.prefix_frame - 1] if lease.prefix_frame else None
                    self._take(lease)
                    tasks.create_task(self._generate(lease, payload))
            guard.cancel()  # from here on the drain's grace is the limit
        # The engine closes after this call; `drain` has a deadline for external requests.
        await self._no_external.wait()

    async def _pause_requests(self, refusal: str) -> None:
        """Wait before the next request for leases; groups go on, because this worker's end would count as their crash."""
        pause_s = self.refused_pause.next_s()
        log.error("the exchange refused the lease request, retrying in %.0f s: %s", pause_s, refusal)
        await self._await_room(pause_s)

    async def _await_room(self, timeout_s: float) -> None:
        self._room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._room.wait()

    async def _end_if_hung(self) -> None:
        """Exit with status 1 once the engine hangs; the coordinator counts this as a crash for each leased group."""
        stall_s = self.spec.policy.generation.stall_s
        await until_hung(self.engine, stall_s)
        log.critical(
            "the engine has not answered for %.0f s (policy.generation.stall_s) with groups %s leased; this worker ends, "
            "so that other workers get the groups",
            stall_s,
            sorted(self._running_by_group),
        )
        from paceline.host.process import end_process

        end_process(1)

    async def drain(self, grace_s: float) -> int:
        """Take no further lease, let running samples and external requests finish, then return the unfinished groups
        and report their number as the result. Takes at most `grace_s` seconds, even if no coordinator accepts the
        groups; then the coordinator notices the silence later. External requests that do not finish in time end with
        the tokens that they have."""
        self._draining.set()
        self._room.set()
        ended = asyncio.gather(self._idle.wait(), self._no_external.wait())
        group_size = self.spec.grpo.num_generations_per_prompt
        return_s = return_seconds(self.num_leases * group_size * self.params.max_new_tokens, grace_s)
        try:
            async with asyncio.timeout(grace_s - return_s):
                await asyncio.shield(ended)
        except TimeoutError:
            left = self.num_leases
            self._sampler.abort()
            for request_id in list(self._external):
                self.engine.abort(request_id)
            try:
                async with asyncio.timeout(return_s):
                    await ended
            except TimeoutError:
                log.warning("%d leases could not be returned: no answer from the exchange", self.num_leases)
            return left
        return 0

    async def generate_external(self, request: GenerationRequest) -> Completion:
        """Generate an external completion, without accounting. Raises InvalidInput, Unavailable, EngineDied."""
        if self.draining:
            raise Unavailable("this worker is leaving; try another worker")
        self._external[request.request_id] = None
        self._no_external.clear()
        try:
            return await self.engine.generate(request)
        finally:
            del self._external[request.request_id]
            if not self._external:
                self._no_external.set()

    async def generate_turn(self, request: GenerationRequest) -> Completion:
        """Generate a turn of an episode, or its rest after a prefix. Raises InvalidInput, Unavailable, EngineDied."""
        self._turns += 1
        self._note_occupancy()
        if self._turns == 1:
            self._pace.begin_work()
        try:
            completion = await self.generate_external(request)
        finally:
            self._turns -= 1
            self._note_occupancy()
            if not self._turns:
                self._pace.end_work()
        begun = len(request.prefix.token_ids) if request.prefix else 0
        self._turn_tokens += len(completion.token_ids) - begun
        return completion

    def text(self, completion: Completion) -> str:
        return self._sampler.text(completion)

    def gauges(self) -> dict[str, float]:
        """Return the gauges since the last heartbeat."""
        return {
            **self._pace.gauges(self.generated_tokens),
            "running": float(self.engine.num_running),
            "occupied": self._occupancy.take(),
            "leases": float(self.num_leases),
        }

    async def _warn(self, text: str) -> None:
        log.warning("run %s: %s", self.run_id, text)
        report = worker_pb2.RunReport(run_id=self.run_id, warning=text)
        await self._membership.report(worker_pb2.ConnectRequest(run_report=report))

    async def _generate(self, lease: pb.Lease, prefix: bytes | None) -> None:
        started_s = time.monotonic()
        try:
            with span("generate", lease.traceparent, group_id=lease.group_id, attempt=lease.attempt):
                prompt_ids, completions = await self._sample(lease, prefix)
        except InvalidInput as error:
            reason = "prompt_too_long" if isinstance(error, PromptTooLong) else "bad_prompt"
            await self._return_lease(lease, error=str(error), reason=reason)
        except PacelineError:
            raise
        except Exception as error:
            await self._blame(lease, error)
        else:
            self._unexpected = 0
            if any(completion.finish_reason == "abort" for completion in completions):
                await self._return_lease(lease, prompt_ids=prompt_ids, completions=completions)
            else:
                await self._submit(lease, prompt_ids, completions, time.monotonic() - started_s)
        finally:
            self._release(lease)

    async def _sample(self, lease: pb.Lease, prefix: bytes | None) -> tuple[IntArray, list[Completion]]:
        """Sample a leased group. Sample it again if that fails and the chat template was corrected in the meantime."""
        reloads = self._template.reloads
        try:
            return await self._sampler.sample(lease, prefix)
        except InvalidInput:
            await asyncio.to_thread(self._template.reload, self.tokenizer)
            if self._template.reloads == reloads:
                raise
            self._running_by_group[lease.group_id] = lease.num_generations
            return await self._sampler.sample(lease, prefix)

    async def _blame(self, lease: pb.Lease, error: Exception) -> None:
        """Return a group with an unexpected error, as a fault of its data. Raises the error if the engine is the
        likelier cause: the engine does not answer, or several groups in a row had an error."""
        self._unexpected += 1
        probe = f"probe/{lease.group_id}/{lease.attempt}"
        if self._unexpected > MAX_UNEXPECTED or not await answers(self.engine, probe, PROBE_S):
            raise error
        log.error("group %d was not generated", lease.group_id, exc_info=error)
        await self._return_lease(lease, error=error_text(error), reason="")

    async def _submit(
        self, lease: pb.Lease, prompt_ids: IntArray, completions: list[Completion], generate_s: float
    ) -> None:
        group = Group(lease.group_id, prompt_ids, tuple(completions))
        result = pb.GroupResult(
            group_id=lease.group_id, attempt=lease.attempt, digest=group.digest(), generate_s=generate_s
        )
        request = pb.ExchangeRequest(run_id=self.run_id, group=result)
        reply, _ = await self._membership.request(request, encode_result(prompt_ids, completions))
        if reply.status == pb.REPLY_STATUS_INVALID:
            log.error("group %d was refused: %s", lease.group_id, reply.message)
            await self._return_lease(lease, error=reply.message, reason="invalid_result")
            return
        newest = max((completion.version_steps().max(initial=-1) for completion in completions), default=-1)
        self._progress.note(
            lambda sums, s: (
                f"run {self.run_id}: {counted(sums['groups'], 'group')} with {counted(sums['tokens'], 'token')} in {s:.0f} s "
                f"({sums['tokens'] / s:,.0f} tokens/s), the last group with version {newest}"
            ),
            groups=1,
            tokens=group.num_tokens,
        )

    async def _return_lease(
        self,
        lease: pb.Lease,
        *,
        prompt_ids: IntArray | None = None,
        completions: Sequence[Completion] = (),
        error: str = "",
        reason: str = "bad_prompt",
    ) -> None:
        """Return a lease, with its generated tokens or an error. The reasons `bad_prompt` and `prompt_too_long` mean
        that every other attempt would fail too; after an empty reason another attempt may succeed."""
        returned = pb.LeaseReturn(
            group_id=lease.group_id,
            attempt=lease.attempt,
            data_error=error[:MAX_ERROR_CHARS],
            data_error_reason=reason if error else "",
            texts=[completion.text for completion in completions],
            finish_reasons=[completion.finish_reason for completion in completions],
        )
        payloads = [encode_completions(prompt_ids, completions)] if prompt_ids is not None else []
        request = pb.ExchangeRequest(run_id=self.run_id, lease_return=returned)
        await self._membership.request(request, payloads)

    def _take(self, lease: pb.Lease) -> None:
        self._running_by_group[lease.group_id] = lease.num_generations
        self._idle.clear()
        self._pace.begin_work()
        self._note_occupancy()

    def _note_occupancy(self) -> None:
        self._occupancy.note(sum(self._running_by_group.values()) + self._turns, self.engine.capacity)

    def _end_sample(self, group_id: int) -> None:
        self._running_by_group[group_id] -= 1
        self._note_occupancy()
        self._room.set()

    def _release(self, lease: pb.Lease) -> None:
        del self._running_by_group[lease.group_id]
        self._note_occupancy()
        self._room.set()
        if not self._running_by_group:
            self._idle.set()
            self._pace.end_work()


async def _created(spec: RunSpec, device: str) -> Engine:
    """Return a new engine. If the caller is cancelled, close it once it is created: it would keep processes and memory."""
    creating = asyncio.create_task(asyncio.to_thread(create_engine, spec, device=device))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):  # it could not be created, for a run that is over
            engine = await asyncio.shield(creating)
            await engine.close()
        raise


def return_seconds(max_tokens: int, grace_s: float) -> float:
    """Return the seconds, at most half of `grace_s`, that are reserved to return up to `max_tokens` tokens."""
    return min(RETURN_S + max_tokens * TOKEN_BYTES / RETURN_BYTES_PER_S, grace_s / 2)


PROBES_PER_LIMIT = 4
PROMPT_IDS = np.zeros(1, np.int32)


async def until_hung(engine: Engine, stall_s: float) -> None:
    """Return when the engine has sequences to decode but has answered no hang probe for `stall_s` seconds; else never."""
    for number in itertools.count():
        await asyncio.sleep(stall_s / PROBES_PER_LIMIT)
        if engine.num_running and not await answers(engine, f"probe/{number}", stall_s):
            return


async def answers(engine: Engine, request_id: str, within_s: float) -> bool:
    """Return whether the engine answers the hang probe `request_id` within `within_s` seconds."""
    request = GenerationRequest(request_id, PROMPT_IDS, SamplingParams(max_new_tokens=1), seed=0)
    probe = asyncio.create_task(engine.generate(request))
    try:
        await asyncio.sleep(0)  # it is submitted from here on
        engine.abort(request_id)
        done, _ = await asyncio.wait((probe,), timeout=within_s)
        return bool(done)
    finally:
        probe.cancel()
        with contextlib.suppress(asyncio.CancelledError, PacelineError):  # a refusal is an answer too
            if probe.done():
                probe.result()
