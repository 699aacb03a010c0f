"""A rollout worker's work on one run: ask for leases as there is room, generate, hand in.

Who waits for whom: the lease loop waits for room or for the exchange; each group's task waits for its samples and
then for the exchange's word. A finished group is kept until that word came. New weights come beside all this
(`services/rollout/weights.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence
from typing import Any

from paceline.backoff import ExponentialBackoff
from paceline.data.tokens import encode_prompt, load_tokenizer
from paceline.errors import InvalidInput, PacelineError, Unavailable, WireError
from paceline.groups import Completion, Group, IntArray
from paceline.spec import RunSpec
from paceline.tracing import span
from paceline.weights.store_format import run_store
from paceline.wire import decode_completions, encode_completions, encode_result
from protos.paceline.v1 import exchange_pb2 as pb
from protos.paceline.v1 import worker_pb2
from rollout.engine import Engine, GenerationRequest, SamplingParams, sample_seed
from rollout.engines import create_engine
from services.common.membership import Membership
from services.rollout.gather import gather_or_cancel
from services.rollout.hang_probe import answers, until_hung
from services.rollout.weights import RolloutWeights

LEASE_WAIT_S = 10.0
HAND_BACK_S = 5.0
"""What a drain keeps of its grace for handing back what did not finish, beside the time that its bytes take."""

HAND_BACK_BYTES_PER_S = 8 << 20
"""Of a worker among many that drain."""

TOKEN_BYTES = 8
"""Its id and its log-probability."""

MAX_UNEXPECTED = 4
"""Groups in a row that may be blamed for what nobody foresaw; with more of them the worker itself is at fault."""
PROBE_S = 30.0
MAX_ERROR_CHARS = 2000
CAPACITY_S = 0.5
"""Seconds between two looks at the engine's capacity while there is no room."""
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
        host: str,
        directory: str,
    ):
        self.spec = spec
        self.run_id = run_id
        self.engine = engine
        self.tokenizer = tokenizer
        self.params = SamplingParams.from_spec(spec.policy.generation)
        self.generated_tokens = 0
        self._membership = membership
        self._leases: dict[int, int] = {}
        """Samples that are still running, by group."""
        self._room = asyncio.Event()
        self.refused_pause = ExponentialBackoff()
        """Before the exchange is asked again after it has refused a request for leases."""
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: dict[str, None] = {}
        self._guests: dict[str, None] = {}
        self._no_guests = asyncio.Event()
        self._no_guests.set()
        self._reported = (time.monotonic(), 0, 0.0)
        self._empty_since_s: float | None = time.monotonic()
        self._empty_s = 0.0
        self._unexpected = 0
        """Groups in a row at which something unforeseen was raised."""
        store_url = run_store(spec.weights.store, run_id, directory)
        self.weights = RolloutWeights(
            run_id, member_id, membership, engine, spec.weights.max_wait_s, host, store_url
        )

    @classmethod
    async def start(
        cls,
        spec: RunSpec,
        assignment: worker_pb2.RunAssignment,
        member_id: str,
        membership: Membership,
        device: str,
        host: str,
    ) -> RolloutRun:
        """Loads tokenizer and engine; weights come later, to `host`, this machine's address for the learner.

        Raises InvalidInput for a model that cannot be used, EngineDied when the engine did not start.
        """
        tokenizer = await asyncio.to_thread(load_tokenizer, spec.policy)
        engine = await asyncio.to_thread(create_engine, spec, device=device)
        try:
            await engine.ready()
        except BaseException:
            await engine.close()
            raise
        return cls(
            spec, assignment.run_id, member_id, membership, engine, tokenizer, host, assignment.directory
        )

    @property
    def num_leases(self) -> int:
        """Leases held: groups that are being generated or wait for the exchange's word."""
        return len(self._leases)

    async def close(self) -> None:
        """Ends receivers and engine."""
        self.weights.close()
        await self.engine.close()

    async def generate_forever(self) -> None:
        """Leases and generates until cancelled, or until everything is handed back after `drain`."""
        async with asyncio.TaskGroup() as groups:
            guard = groups.create_task(self._end_if_stuck())
            while not self._draining:
                group_size, running = self.spec.grpo.num_generations_per_prompt, sum(self._leases.values())
                # One group waits, so that no slot stays empty.
                room = self.engine.capacity + group_size - running
                if room < group_size and running:
                    self._room.clear()
                    with contextlib.suppress(TimeoutError):  # the capacity may have grown with nobody ending
                        await asyncio.wait_for(self._room.wait(), CAPACITY_S)
                    continue
                request = pb.ExchangeRequest(
                    run_id=self.run_id,
                    lease=pb.LeaseRequest(
                        room=room, wait_s=LEASE_WAIT_S, held=pb.Held(group_ids=self._leases)
                    ),
                )
                reply, payloads = await self._membership.request(request)
                if reply.status == pb.REPLY_STATUS_STALE:
                    guard.cancel()
                    return  # the run is over; the next assignment is on its way
                if reply.status == pb.REPLY_STATUS_INVALID:
                    await self._ask_later(reply.message)
                    continue
                self.refused_pause.reset()
                for lease in reply.lease.leases:
                    if lease.group_id in self._leases:
                        continue  # given out anew while it is in hand: the result of an earlier attempt counts as well
                    if self._draining:
                        await self._hand_back(lease)
                        continue
                    payload = payloads[lease.prefix_frame - 1] if lease.prefix_frame else None
                    self._take(lease)
                    groups.create_task(self._generate(lease, payload))
            guard.cancel()  # from here on the drain's grace is the limit
        await self._no_guests.wait()  # the engine ends with this call; `drain` has a deadline for them

    async def _ask_later(self, refusal: str) -> None:
        """The exchange refuses a request for leases. What is in hand goes on: an end of this worker would lose it, and would count
        as a crash of these groups.
        """
        pause_s = self.refused_pause.next_s()
        log.error("asking for leases again in %.0f s, the exchange refuses: %s", pause_s, refusal)
        self._room.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._room.wait(), pause_s)

    async def _end_if_stuck(self) -> None:
        """Ends the process as a crash would: what the engine hangs on cannot be ended otherwise, and a group that was
        there each time is found out."""
        stall_s = self.spec.policy.generation.stall_s
        await until_hung(self.engine, stall_s)
        log.critical(
            "the engine has not answered for %.0f s (policy.generation.stall_s) with groups %s in hand; this worker ends, "
            "so that others get them",
            stall_s,
            sorted(self._leases),
        )
        from paceline.process import end_process

        end_process(1)

    async def drain(self, grace_s: float) -> int:
        """No further lease; running samples may finish, then go back unfinished. Returns how many leases.

        What visitors asked for has the same time, and then ends as it is. Returns within `grace_s` seconds, also when no
        coordinator takes anything back: it then finds out by the worker's silence.
        """
        self._draining = True
        self._room.set()
        ended = asyncio.gather(self._idle.wait(), self._no_guests.wait())
        group_size = self.spec.grpo.num_generations_per_prompt
        hand_back_s = hand_back_seconds(self.num_leases * group_size * self.params.max_new_tokens, grace_s)
        try:
            await asyncio.wait_for(asyncio.shield(ended), grace_s - hand_back_s)
        except TimeoutError:
            left = self.num_leases
            for request_id in [*self._running, *self._guests]:
                self.engine.abort(request_id)
            try:
                await asyncio.wait_for(ended, hand_back_s)
            except TimeoutError:
                log.warning(
                    "%d leases could not be handed back: no answer from the exchange", self.num_leases
                )
            return left
        return 0

    async def ask(self, request: GenerationRequest) -> Completion:
        """A completion for somebody outside of the run: no lease, no books. Raises what `Engine.generate` raises."""
        if self._draining:
            raise Unavailable("this worker is leaving; ask another")
        self._guests[request.request_id] = None
        self._no_guests.clear()
        try:
            return await self.engine.generate(request)
        finally:
            del self._guests[request.request_id]
            if not self._guests:
                self._no_guests.set()

    def decode(self, token_ids: IntArray) -> str:
        """Text of a completion, without special tokens."""
        return str(self.tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))

    def gauges(self) -> dict[str, float]:
        """For the heartbeat: what happened since the last one."""
        now_s, empty_s = time.monotonic(), self._empty_s
        if self._empty_since_s is not None:
            empty_s += now_s - self._empty_since_s
        since_s, tokens, earlier_empty_s = self._reported
        self._reported = (now_s, self.generated_tokens, empty_s)
        elapsed_s = max(now_s - since_s, 1e-6)
        return {
            "tokens_per_s": (self.generated_tokens - tokens) / elapsed_s,
            "wait_fraction": min(1.0, (empty_s - earlier_empty_s) / elapsed_s),
            "running": float(self.engine.num_running),
            "leases": float(self.num_leases),
        }

    # One group

    async def _generate(self, lease: pb.Lease, prefix: bytes | None) -> None:
        """From lease to the exchange's word."""
        started_s = time.monotonic()
        try:
            with span("generate", lease.traceparent, group_id=lease.group_id, attempt=lease.attempt):
                prompt_ids, completions = await self._sample(lease, prefix)
        except InvalidInput as error:
            await self._hand_back(lease, error=str(error))
        except PacelineError:
            raise
        except Exception as error:
            await self._blame(lease, error)
        else:
            self._unexpected = 0
            if any(completion.finish_reason == "abort" for completion in completions):
                await self._hand_back(lease, prompt_ids=prompt_ids, completions=completions)
            else:
                await self._hand_in(lease, prompt_ids, completions, time.monotonic() - started_s)
        finally:
            self._release(lease)

    async def _blame(self, lease: pb.Lease, error: Exception) -> None:
        """Hands back a group at which something unforeseen was raised, as the fault of its data.

        Raises the error where that is not likely: the engine does not answer, or several groups in a row had one.
        """
        self._unexpected += 1
        probe = f"probe/{lease.group_id}/{lease.attempt}"
        if self._unexpected > MAX_UNEXPECTED or not await answers(self.engine, probe, PROBE_S):
            raise error
        log.error("group %d was not generated", lease.group_id, exc_info=error)
        await self._hand_back(lease, error=f"{type(error).__name__}: {error}")

    async def _sample(self, lease: pb.Lease, prefix: bytes | None) -> tuple[IntArray, list[Completion]]:
        prompt_ids, begun = self._begun(lease, prefix)
        completions = await gather_or_cancel(
            self._sample_one(lease, i, prompt_ids, begun[i]) for i in range(lease.num_generations)
        )
        return prompt_ids, [
            Completion(c.token_ids, c.logprobs, c.spans, c.finish_reason, self.decode(c.token_ids))
            for c in completions
        ]

    def _begun(self, lease: pb.Lease, prefix: bytes | None) -> tuple[IntArray, Sequence[Completion | None]]:
        """The prompt's tokens, and what an earlier worker has made of each sample; one that cannot be read is made anew."""
        if prefix is not None:
            reasons = lease.prefix_finish_reasons
            try:
                prompt_ids, begun = decode_completions(prefix, reasons, [""] * len(reasons))
                if len(begun) == lease.num_generations:
                    return prompt_ids, begun
                log.error("group %d came with %d samples and is begun anew", lease.group_id, len(begun))
            except WireError as error:
                log.error("group %d is begun anew: %s", lease.group_id, error)
        prompt = json.loads(lease.prompt_json)
        prompt_ids = encode_prompt(self.tokenizer, prompt, self.spec.data.apply_chat_template)
        return prompt_ids, [None] * lease.num_generations

    async def _sample_one(
        self, lease: pb.Lease, index: int, prompt_ids: IntArray, begun: Completion | None
    ) -> Completion:
        try:
            if begun is not None and begun.finish_reason != "abort":
                return begun
            request_id = f"{lease.group_id}/{lease.attempt}/{index}"
            self._running[request_id] = None
            prefix = begun if begun is not None and len(begun.token_ids) else None
            seed = sample_seed(lease.seed, lease.attempt, index)
            request = GenerationRequest(
                request_id, prompt_ids, SamplingParams.from_proto(lease.params), seed, prefix
            )
            try:
                completion = await self.engine.generate(request)
            finally:
                del self._running[request_id]
            self.generated_tokens += len(completion.token_ids) - (len(prefix.token_ids) if prefix else 0)
            return completion
        finally:
            self._leases[lease.group_id] -= 1
            self._room.set()

    async def _hand_in(
        self, lease: pb.Lease, prompt_ids: IntArray, completions: list[Completion], generate_s: float
    ) -> None:
        group = Group(lease.group_id, prompt_ids, tuple(completions))
        result = pb.GroupResult(
            group_id=lease.group_id,
            attempt=lease.attempt,
            digest=group.digest(),
            generate_s=generate_s,
        )
        request = pb.ExchangeRequest(run_id=self.run_id, group=result)
        reply, _ = await self._membership.request(request, encode_result(prompt_ids, completions))
        if reply.status == pb.REPLY_STATUS_INVALID:
            log.error("group %d was refused: %s", lease.group_id, reply.message)
            await self._hand_back(lease, error=reply.message, reason="invalid_result")

    async def _hand_back(
        self,
        lease: pb.Lease,
        *,
        prompt_ids: IntArray | None = None,
        completions: Sequence[Completion] = (),
        error: str = "",
        reason: str = "bad_prompt",
    ) -> None:
        returned = pb.LeaseReturn(
            group_id=lease.group_id,
            attempt=lease.attempt,
            data_error=error[:MAX_ERROR_CHARS],
            data_error_reason=reason if error else "",
            texts=[completion.text for completion in completions],
            finish_reasons=[completion.finish_reason for completion in completions],
        )
        payloads = [encode_completions(prompt_ids, completions)] if prompt_ids is not None else []
        await self._membership.request(
            pb.ExchangeRequest(run_id=self.run_id, lease_return=returned), payloads
        )

    def _take(self, lease: pb.Lease) -> None:
        self._leases[lease.group_id] = lease.num_generations
        self._idle.clear()
        if self._empty_since_s is not None:
            self._empty_s += time.monotonic() - self._empty_since_s
            self._empty_since_s = None

    def _release(self, lease: pb.Lease) -> None:
        del self._leases[lease.group_id]
        self._room.set()
        if not self._leases:
            self._idle.set()
            self._empty_since_s = time.monotonic()


def hand_back_seconds(max_tokens: int, grace_s: float) -> float:
    """What a drain keeps of its grace for handing back up to so many tokens: half of it at most."""
    return min(HAND_BACK_S + max_tokens * TOKEN_BYTES / HAND_BACK_BYTES_PER_S, grace_s / 2)
