"""Rollout worker, reward worker and learner rank as the exchange sees them: they encode real messages and keep
every reply. Each message is handled in a transaction of its own, as the server does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from paceline.data.prompts import open_prompts
from paceline.groups import Completion, Group, IntArray, Version, VersionSpan
from paceline.services.coordinator.exchange import evaluation
from paceline.services.coordinator.exchange.leases import revoke_from_member
from paceline.services.coordinator.exchange.notices import Notice
from paceline.services.coordinator.exchange.replies import Outcome
from paceline.services.coordinator.exchange.requests.table import kind_of, validate_upload
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.exchange.transport.dispatch import handle
from paceline.services.coordinator.exchange.uploads.intake import Arrived, Limits, store
from paceline.services.coordinator.ledger.ledger import GROUPS_AT_ONCE, Ledger
from paceline.services.coordinator.ledger.segments import read_frame
from paceline.services.coordinator.members.registry import Introduction, Member
from paceline.spec import RunSpec
from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL, decode_completions, decode_result, encode_completions, encode_result

OK, COMMITTED = pb.REPLY_STATUS_OK, pb.REPLY_STATUS_COMMITTED
DUPLICATE, STALE, INVALID = pb.REPLY_STATUS_DUPLICATE, pb.REPLY_STATUS_STALE, pb.REPLY_STATUS_INVALID
PROMPT_IDS = np.array([5, 6, 7], np.int32)
MAX_NEW_TOKENS = 16


def write_prompts(path: Path, number: int = 7) -> Path:
    """A JSONL file of prompts with one further column."""
    path.write_text("".join(json.dumps({"prompt": f"p{i}", "answer": i}) + "\n" for i in range(number)))
    return path


def make_spec(directory: Path, *, grpo: Any = (), async_grpo: Any = (), **sections: Any) -> RunSpec:
    """A run of 2 groups of 2 completions per step with one reward function; keyword sections on top."""
    data = {"train": str(write_prompts(directory / "train.jsonl"))}
    if dict(grpo).keys() & {"val_period", "val_at_start", "val_at_end"}:
        data["validation"] = str(write_prompts(directory / "validation.jsonl", 3))
    grpo = {
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "max_num_steps": 4,
        "max_generation_failures": 1,
    } | dict(grpo)
    tree: dict[str, Any] = {
        "name": "test",
        "policy": {"model_name": "none", "generation": {"max_new_tokens": MAX_NEW_TOKENS}},
        "data": data,
        "grpo": grpo,
        "async_grpo": dict(async_grpo),
        "rewards": [{"function": "exact_match"}],
    }
    return RunSpec.model_validate(tree | sections)


class World:
    """A ledger with one run on it, and the exchange over both."""

    def __init__(self, directory: Path, spec: RunSpec, run_id: str = "test-1"):
        self.path = directory / "ledger.sqlite"
        self.begun: dict[tuple[int, int], tuple[Completion, ...]] = {}
        """Contents of the leases, by group and attempt."""
        self.spec = spec
        self.run_id = run_id
        self.now_s = 1000.0
        self.notices: list[Notice] = []
        self.check = True
        """True where the ledger has to verify at the end of the test."""
        self.ledger = Ledger(self.path)
        with self.ledger.transaction(synced=False):
            # Without defaults, because every test reads it again to verify its ledger.
            spec_yaml = yaml.safe_dump(spec.model_dump(mode="json", exclude_unset=True))
            self.ledger.add_run(run_id, spec_yaml, str(directory))
            self.ledger.update_run(run_id, state="running")
        self._activate()

    @classmethod
    def found(cls, directory: Path, spec: RunSpec, run_id: str = "test-1") -> World:
        """A world whose ledger is in `directory` already, as after a power cut: nobody is a member."""
        world = cls.__new__(cls)
        world.path, world.spec, world.run_id = directory / "ledger.sqlite", spec, run_id
        world.now_s, world.notices, world.check, world.begun = 1000.0, [], True, {}
        world.ledger = Ledger(world.path)
        world._activate()
        for member_id, _ in world.ledger.holders():  # their time-out passes without a word from them
            world.release(member_id)
        return world

    def restart(self) -> None:
        """The coordinator dies and comes back from the file."""
        self.ledger.close()
        self.ledger = Ledger(self.path)
        known, senders, versions = self._known, self.exchange.senders, self.exchange.workers.versions
        held = self._versions
        self._activate()
        # They come back and say so.
        self._known, self.exchange.senders, self.exchange.workers.versions = known, senders, versions
        self._versions = held

    def close(self) -> None:
        """Closes the ledger."""
        self.ledger.close()

    def send(self, request: pb.ExchangeRequest, frames: Sequence[bytes] = ()) -> Outcome:
        """One request with the current protocol, term and secret, unless it brings its own."""
        request.protocol = request.protocol or PROTOCOL
        request.term = request.term or self.ledger.term
        request.run_id = request.run_id or self.run_id
        request.member_id = request.member_id or "anybody"
        request.secret = request.secret or self._secret(request)
        parsed = pb.ExchangeRequest.FromString(request.SerializeToString())
        arrived = Arrived(parsed, list(frames), Limits.of(self.spec))
        if kind_of(arrived.kind).has_bulk(arrived.frames):
            validate_upload(arrived)
            store(self.ledger.payloads, [arrived])
        with self.ledger.transaction(synced=False):
            outcome = handle(self.exchange, arrived, self.now_s)
        self.notices += self.exchange.notices.take()
        payloads = [read_frame(frame) for frame in outcome.payloads]
        for lease in outcome.reply.lease.leases:
            if lease.prefix_frame:
                reasons = lease.prefix_finish_reasons
                _, begun = decode_completions(payloads[lease.prefix_frame - 1], reasons, [""] * len(reasons))
                self.begun[lease.group_id, lease.attempt] = begun
        return replace(outcome, payloads=payloads)

    def enter(self, member_id: str, role: common_pb2.Role.ValueType = common_pb2.ROLE_ROLLOUT, **fields: Any) -> Member:
        """A worker says Hello; it has a secret from then on."""
        self._known[member_id] = enter(self.exchange, member_id, role, **fields)
        return self._known[member_id]

    def acknowledge(self, member_id: str, version: Version) -> None:
        """A rollout worker samples from a version."""
        self._versions[member_id] = self.exchange.workers.versions[member_id] = version
        self.exchange.workers.note_session(version.session)

    def _secret(self, request: pb.ExchangeRequest) -> bytes:
        """Its sender's. A worker that was taken for gone comes back before it hands anything in."""
        known = self._known.get(request.member_id)
        back = request.WhichOneof("body") in ("group", "lease_return", "score")
        if known is not None and back and self.exchange.senders.get(request.member_id) is None:
            if request.member_id in self._versions:
                self.exchange.workers.versions[request.member_id] = self._versions[request.member_id]
            return self.enter(request.member_id, known.role).stream.secret
        return known.stream.secret if known is not None else b""

    def new_session(self) -> int:
        """A learner starts (again)."""
        session = int(self.row["session"]) + 1
        with self.ledger.transaction(synced=False):
            self.ledger.update_run(self.run_id, session=session)
        return session

    def release(self, member_id: str, *, crashed: bool = False) -> int:
        """A member is gone, as the coordinator takes note of it."""
        self.exchange.senders.leave(member_id)
        with self.ledger.transaction(synced=False):
            released = revoke_from_member(self.exchange, member_id, crashed=crashed)
            self.ledger.evaluations.unpin_member(self.run_id, member_id)
        self.notices += self.exchange.notices.take()
        return released

    def set_state(self, state: str) -> None:
        """Pause and resume."""
        with self.ledger.transaction(synced=False):
            self.ledger.update_run(self.run_id, state=state)

    def begin_evaluation(self, step: int) -> None:
        """Queues an evaluation."""
        with self.ledger.transaction(synced=False):
            evaluation.begin(self.exchange, self.run, step)

    def end(self) -> None:
        """Ends the run."""
        with self.ledger.transaction(synced=False):
            self.exchange.end_run(self.run_id)

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        """Contents of the notices of a kind."""
        return [notice.content for notice in self.notices if notice.kind == kind]

    @property
    def row(self) -> Any:
        """The run's row."""
        return self.ledger.run(self.run_id)

    @property
    def counters(self) -> dict[str, int]:
        """The run's counters."""
        return self.ledger.counters(self.run_id)

    def group(self, group_id: int) -> Any:
        """The row of a group."""
        row = self.exchange.group_queries.get(self.run.run_id, group_id)
        assert row is not None
        return row

    def states(self) -> dict[int, str]:
        """State of every group, evaluations included."""
        rows = self.ledger.db.execute("SELECT group_id, state FROM groups ORDER BY group_id")
        return {row["group_id"]: row["state"] for row in rows}

    def dump(self) -> list[str]:
        """Everything in the ledger: equal dumps mean that nothing has changed."""
        return list(self.ledger.db.iterdump())

    def _activate(self) -> None:
        self.ledger.db.execute("PRAGMA synchronous = OFF")  # no test here survives a power cut
        self.ledger.sync = lambda: None  # type: ignore[method-assign]
        self.exchange = Exchange(self.ledger)
        self._known: dict[str, Member] = {}
        """Whoever was a member once."""
        self._versions: dict[str, Version] = {}
        """Return the leases that rollout workers hold, members or not."""
        self.enter("anybody")
        grpo = self.spec.algorithm == "grpo"
        prompts = open_prompts(self.spec.data, self.spec.seed) if grpo else None
        known = self.spec.data.validation is not None
        validation = open_prompts(self.spec.data, self.spec.seed, validation=True) if known else None
        self.run = ActiveRun(self.run_id, self.spec, prompts, validation)
        self.exchange.active = self.run


MakeWorld = Callable[..., World]


def enter(
    exchange: Exchange,
    member_id: str,
    role: common_pb2.Role.ValueType = common_pb2.ROLE_ROLLOUT,
    **fields: Any,
) -> Member:
    """A member that may speak to the exchange: it that was there before, or a new one; `fields` are those of the member
    or of its introduction."""
    member = exchange.senders.get(member_id)
    if member is None or member.role != role:
        member = Member(member_id, Introduction(role), 0.0)
        exchange.senders.enter(member)
    said = {name: fields.pop(name) for name in ("rank", "address") if name in fields}
    member.introduction = replace(member.introduction, **said)
    for name, value in fields.items():
        setattr(member, name, value)
    return member


def make_completion(version: Version, length: int, seed: int, text: str = "t") -> Completion:
    """A finished completion, all of one version."""
    rng = np.random.default_rng(seed)
    tokens_T = rng.integers(0, 50, length).astype(np.int32)
    logprobs_T = -rng.random(length).astype(np.float32)
    return Completion(tokens_T, logprobs_T, (VersionSpan(*version, 0, length),), "stop", text)


def named(completion: Completion, *samplers: str) -> Completion:
    """The completion with the sampler of each of its spans."""
    spans = zip(completion.spans, samplers, strict=True)
    return replace(completion, spans=tuple(span._replace(sampler=sampler) for span, sampler in spans))


def go_on(begun: Completion, fresh: Completion) -> Completion:
    """A completion that another worker began, and this one ends after MAX_NEW_TOKENS at most."""
    start = len(begun.token_ids)
    new = slice(0, MAX_NEW_TOKENS - start)
    tokens_T = np.concatenate([begun.token_ids, fresh.token_ids[new]])
    if begun.finish_reason != "abort" or len(tokens_T) == start:
        reason = "length" if begun.finish_reason == "abort" else begun.finish_reason
        return replace(begun, finish_reason=reason, text=fresh.text)
    version = fresh.spans[0]
    spans = (*begun.spans, version._replace(start=start, end=len(tokens_T)))
    logprobs_T = np.concatenate([begun.logprobs, fresh.logprobs[new]])
    return Completion(tokens_T, logprobs_T, spans, "stop", fresh.text)


def group_result(
    group_id: int, attempt: int, completions: Sequence[Completion], prompt_ids: IntArray = PROMPT_IDS
) -> tuple[pb.ExchangeRequest, list[bytes]]:
    """Request and frames of a generated group."""
    result = pb.GroupResult(
        group_id=group_id,
        attempt=attempt,
        digest=Group(group_id, prompt_ids, tuple(completions)).digest(),
    )
    return pb.ExchangeRequest(group=result), encode_result(prompt_ids, completions)


class Rollout:
    """A rollout worker that holds a version."""

    def __init__(self, world: World, member_id: str = "rollout", step: int = 0, session: int = 1):
        self.world = world
        self.member_id = member_id
        world.enter(member_id)
        self.hold(step, session)

    def hold(self, step: int, session: int = 1) -> None:
        """Acknowledges a version."""
        self.version = Version(session, step)
        self.world.acknowledge(self.member_id, self.version)

    def ask(self, room: int = 2) -> Outcome:
        """Asks for leases."""
        return self.world.send(pb.ExchangeRequest(member_id=self.member_id, lease=pb.LeaseRequest(room=room)))

    def lease(self, room: int = 2) -> list[pb.Lease]:
        """The leases given."""
        return list(self.ask(room).reply.lease.leases)

    def completions(self, lease: pb.Lease, length: int = 4) -> list[Completion]:
        """Return the completions for a lease: completion i has length + i tokens."""
        seeds = [lease.group_id * 100 + lease.attempt * 10 + i for i in range(lease.num_generations)]
        fresh = [
            named(make_completion(self.version, length + i, seed, f"{seed}"), self.member_id)
            for i, seed in enumerate(seeds)
        ]
        begun = self.world.begun.get((lease.group_id, lease.attempt))
        return fresh if begun is None else [go_on(*pair) for pair in zip(begun, fresh, strict=True)]

    def result(self, lease: pb.Lease, length: int = 4) -> tuple[pb.ExchangeRequest, list[bytes]]:
        """The message for a finished lease."""
        request, frames = group_result(lease.group_id, lease.attempt, self.completions(lease, length))
        request.member_id = self.member_id
        return request, frames

    def finish(self, lease: pb.Lease, length: int = 4) -> int:
        """Sends the finished lease; returns the reply's status."""
        return self.world.send(*self.result(lease, length)).reply.status

    def return_lease(
        self, lease: pb.Lease, completions: Sequence[Completion] = (), error: str = "", reason: str = ""
    ) -> Outcome:
        """Hands a lease back, perhaps with what was begun, perhaps because of its data."""
        returned = pb.LeaseReturn(
            group_id=lease.group_id,
            attempt=lease.attempt,
            data_error=error,
            data_error_reason=reason,
            finish_reasons=[c.finish_reason for c in completions],
            texts=[c.text for c in completions],
        )
        frames = [encode_completions(PROMPT_IDS, completions)] if completions else []
        return self.world.send(pb.ExchangeRequest(member_id=self.member_id, lease_return=returned), frames)


class Reward:
    """A reward worker."""

    def __init__(self, world: World, member_id: str = "reward"):
        self.world = world
        self.member_id = member_id
        self.texts: dict[int, list[str]] = {}
        """Of the groups that it was given."""
        world.enter(member_id, common_pb2.ROLE_REWARD)

    def ask(self, room: int = 8) -> Outcome:
        """Asks for tasks."""
        return self.world.send(pb.ExchangeRequest(member_id=self.member_id, task=pb.TaskRequest(room=room)))

    def tasks(self, room: int = 8) -> list[pb.ScoreTask]:
        """The tasks given; their frames are those of the group."""
        outcome = self.ask(room)
        payloads = iter(outcome.payloads)
        for task, arrays, texts in zip(outcome.reply.task.tasks, payloads, payloads, strict=True):
            self.texts[task.group_id] = [completion.text for completion in decode_result(arrays, texts)[1]]
        return list(outcome.reply.task.tasks)

    def send(self, task: pb.ScoreTask, **fields: Any) -> Outcome:
        """Sends a score with these fields."""
        return self.world.send(self.message(task, **fields))

    def message(self, task: pb.ScoreTask, **fields: Any) -> pb.ExchangeRequest:
        """A score with these fields."""
        score = {"group_id": task.group_id, "attempt": task.attempt, "digest": task.digest} | fields
        return pb.ExchangeRequest(member_id=self.member_id, score=pb.ScoreResult(**score))

    def score(self, task: pb.ScoreTask, rewards: Sequence[float] | None = None) -> int:
        """Scores 0, 1, 0, 1 … or `rewards`; returns the reply's status."""
        count = len(self.texts.get(task.group_id, ("", "")))
        values = [float(i % 2) for i in range(count)] if rewards is None else rewards
        functions = [reward.label for reward in self.world.spec.rewards]
        return self.send(task, rewards=values, functions=functions).reply.status

    def fail(self, task: pb.ScoreTask) -> int:
        """Says that a function failed."""
        return self.send(task, error="exact_match: boom").reply.status


class Learner:
    """A learner of some ranks in a session."""

    def __init__(self, world: World, world_size: int = 1, session: int | None = None):
        self.world = world
        self.world_size = world_size
        self.session = world.new_session() if session is None else session
        for rank in range(world_size):
            world.enter(f"learner-{rank}", common_pb2.ROLE_LEARNER, rank=rank, session=0 if rank else self.session)

    def ask(self, step: int, rank: int = 0) -> Outcome:
        """Asks for a rank's part."""
        asked = pb.BatchRequest(step=step, rank=rank, world_size=self.world_size)
        return self._send(rank, batch=asked)

    def part(self, step: int, rank: int = 0) -> list[pb.BatchGroup] | None:
        """A rank's part; None while there is none."""
        reply = self.ask(step, rank).reply
        assert reply.status == OK, reply.message
        return list(reply.batch.groups) if reply.batch.state == pb.BATCH_STATE_READY else None

    def receipt(self, step: int, rank: int, groups: Sequence[pb.BatchGroup], tokens: int | None = None) -> Outcome:
        """Reports what the rank trained."""
        if tokens is None:
            tokens = sum(self.world.group(group.group_id)["tokens"] for group in groups)
        receipt = pb.Receipt(step=step, rank=rank, world_size=self.world_size, tokens=tokens)
        receipt.groups.extend(
            pb.BatchGroup(group_id=g.group_id, digest=g.digest, scores_digest=g.scores_digest) for g in groups
        )
        receipt.metrics["loss"] = 0.5
        return self._send(rank, receipt=receipt)

    def _send(self, rank: int, **body: Any) -> Outcome:
        """From the member that is this rank, in this learner's session."""
        return self.world.send(pb.ExchangeRequest(member_id=f"learner-{rank}", session=self.session, **body))

    def train(self, step: int) -> list[list[int]] | None:
        """All ranks take and train their parts; returns the group ids by rank, None while there is no batch."""
        parts = [self.part(step, rank) for rank in range(self.world_size)]
        if parts[0] is None:
            return None
        for rank, part in enumerate(parts):
            assert part is not None
            assert self.receipt(step, rank, part).reply.status == COMMITTED
        return [[group.group_id for group in part or []] for part in parts]


def prune(world: World, at_once: int = GROUPS_AT_ONCE) -> int:
    """Prunes until nothing is due; returns how often it had to."""
    number = 0
    while world.ledger.is_pruning_due(world.run_id, world.run.batch_size):
        with world.ledger.transaction(synced=False):
            world.ledger.prune(world.run_id, world.run.batch_size, at_once)
        number += 1
    return number


def fill(rollout: Rollout, reward: Reward, number: int) -> list[int]:
    """Generates and scores up to `number` groups; returns their ids."""
    leases = rollout.lease(number * rollout.world.spec.grpo.num_generations_per_prompt)
    for lease in leases:
        assert rollout.finish(lease) == COMMITTED
    for task in reward.tasks():
        assert reward.score(task) == COMMITTED
    return [lease.group_id for lease in leases]
