"""A real rollout service that lies: about what it sampled, about whose it is, and by saying nothing.

    PACELINE_LIES=/path/of/orders.json python liar.py OPTIONS…

At SIGUSR1 it reads the orders, `{"lie": "versions", "report": "/path", "lasts_s": 10}`, and tells that lie with the next group
that it would hand in; then it hands the honest group in. `silence`: for `lasts_s` seconds it hands nothing in and hands nothing back, while its
heartbeats go on. One line of JSON for each lie is appended to the report: what was sent, and what the exchange answered.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zmq
import zmq.asyncio
from lies import ABOUT_GROUPS

import paceline.services.rollout.main
import paceline.services.rollout.worker
from paceline.groups import Completion, Group, IntArray
from paceline.services.common.worker.exchange_connection import _reachable
from paceline.services.common.worker.membership import Membership
from paceline.services.rollout.run import RolloutRun
from paceline.v1 import exchange_pb2 as pb
from paceline.v1 import worker_pb2
from paceline.wire import PROTOCOL, encode_result

ORDERS = Path(os.environ["PACELINE_LIES"])
ANSWER_S = 10.0
NO_GROUP = 10**6
Sampled = tuple[IntArray, list[Completion]]

armed = threading.Event()
orders: dict[str, Any] = {}
welcome = worker_pb2.Welcome()


def arm(*_: object) -> None:
    """The next group comes with the lie that is ordered now."""
    orders.update(json.loads(ORDERS.read_text()))
    armed.set()


def spans_with(sampled: Sampled, **facts: int) -> Sampled:
    """The same tokens, said to be of another version."""
    prompt_ids, completions = sampled
    return prompt_ids, [replace(c, spans=tuple(span._replace(**facts) for span in c.spans)) for c in completions]


def logprobs_of(sampled: Sampled, value: float) -> Sampled:
    """The same tokens with another probability."""
    prompt_ids, completions = sampled
    return prompt_ids, [replace(c, logprobs=np.full_like(c.logprobs, value)) for c in completions]


def token_of(sampled: Sampled, token_id: int) -> Sampled:
    """One token is another one."""
    prompt_ids, completions = sampled
    ids = completions[0].token_ids.copy()
    ids[0] = token_id
    return prompt_ids, [replace(completions[0], token_ids=ids), *completions[1:]]


def longer(sampled: Sampled) -> Sampled:
    """More tokens than were asked for."""
    prompt_ids, completions = sampled
    first = completions[0]
    number = 5000
    grown = replace(
        first,
        token_ids=np.resize(first.token_ids, number),
        logprobs=np.resize(first.logprobs, number),
        spans=(first.spans[-1]._replace(start=0, end=number),),
    )
    return prompt_ids, [grown, *completions[1:]]


CHANGES: dict[str, Callable[[Sampled], Sampled]] = {
    "versions": lambda sampled: spans_with(sampled, step=10**9),
    "huge versions": lambda sampled: spans_with(sampled, step=2**40),
    "negative versions": lambda sampled: spans_with(sampled, step=-1),
    "sessions": lambda sampled: spans_with(sampled, session=999),
    "session before the first": lambda sampled: spans_with(sampled, session=0),
    "lengths": longer,
    "prompt": lambda sampled: (np.append(sampled[0], sampled[0][-1:]), sampled[1]),
    "no prompt": lambda sampled: (sampled[0][:0], sampled[1]),
    "vocabulary": lambda sampled: token_of(sampled, 100_000),
    "negative token": lambda sampled: token_of(sampled, -5),
    "probabilities": lambda sampled: logprobs_of(sampled, 3e38),
    "not a number": lambda sampled: logprobs_of(sampled, float("nan")),
}
assert tuple(CHANGES) == ABOUT_GROUPS


def others_lease(ledger: Path, run_id: str, own: int) -> tuple[int, int, str]:
    """A group that somebody else holds, its attempt and its holder; one that is nobody's when there is none."""
    reader = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)
    try:
        row = reader.execute(
            "SELECT group_id, attempt, member_id FROM groups WHERE run_id = ? AND state = 'leased' AND group_id != ?"
            " AND member_id NOT LIKE 'liar%' LIMIT 1",
            (run_id, own),
        ).fetchone()
    finally:
        reader.close()
    return (NO_GROUP, 1, "rollout-0") if row is None else (int(row[0]), int(row[1]), str(row[2]))


class LyingRun(RolloutRun):
    """One run's work, with the lie that was ordered before the next honest group."""

    async def _submit(self, lease: pb.Lease, *sampled: Any) -> None:
        if armed.is_set():
            armed.clear()
            await self._lie(lease, sampled[0], list(sampled[1]))
        await super()._submit(lease, *sampled)

    async def _lie(self, lease: pb.Lease, prompt_ids: IntArray, completions: list[Completion]) -> None:
        lie, said = orders["lie"], {"lie": orders["lie"], "group_id": lease.group_id}
        if lie == "silence":
            write_down(said)
            await asyncio.sleep(orders["lasts_s"])
            return
        if lie in CHANGES:
            prompt_ids, completions = CHANGES[lie]((prompt_ids, completions))
        group = Group(lease.group_id, prompt_ids, tuple(completions))
        own = pb.GroupResult(group_id=lease.group_id, attempt=lease.attempt, digest=group.digest())
        request = pb.ExchangeRequest(run_id=self.run_id, member_id=self._membership._hello().member_id)
        request.secret, frames = welcome.secret, encode_result(prompt_ids, completions)
        group_id, attempt, holder = others_lease(Path(orders["ledger"]), self.run_id, lease.group_id)
        match lie:
            case "another's result":
                request.group.CopyFrom(own)
                request.group.group_id, request.group.attempt = group_id, attempt
                request.group.digest = Group(group_id, prompt_ids, tuple(completions)).digest()
            case "another's return":
                request.lease_return.group_id, request.lease_return.attempt = group_id, attempt
                request.lease_return.data_error, frames = "no such thing", []
            case "another's name":
                request.member_id, frames = holder, []
                request.lease.room = 64
                request.lease.held.SetInParent()
            case "no secret":
                request.group.CopyFrom(own)
                request.secret = b""
            case "score":
                request.score.group_id, request.score.attempt, frames = lease.group_id, 1, []
                request.score.digest = own.digest
                request.score.rewards.extend([1e6] * len(completions))
                request.score.functions.append("digits")
            case "receipt":
                request.session, frames = 1, []
                request.receipt.step, request.receipt.world_size, request.receipt.tokens = lease.step, 1, 7
            case "batch":
                request.session, frames = 1, []
                request.batch.step, request.batch.world_size = lease.step, 1
            case _:
                request.group.CopyFrom(own)
        if lie in ABOUT_GROUPS or lie == "another's result":  # else the honest group has the same digest
            said |= {"group_id": request.group.group_id, "digest": request.group.digest}
        said["status"] = await ask(request, frames, self._membership)
        write_down(said)


async def ask(request: pb.ExchangeRequest, frames: list[bytes], membership: Membership) -> str:
    """Return the exchange's answer, over a separate connection."""
    request.protocol, request.term, request.request_id = PROTOCOL, welcome.term, 1
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.connect(_reachable(welcome.exchange_endpoint, membership.coordinator))
        await socket.send_multipart([request.SerializeToString(), *frames])
        async with asyncio.timeout(ANSWER_S):
            header, *_ = await socket.recv_multipart()
        reply = pb.ExchangeReply.FromString(header)
        given = bool(reply.lease.leases or reply.task.tasks or reply.batch.groups)
        return pb.ReplyStatus.Name(reply.status).removeprefix("REPLY_STATUS_") + " with something" * given
    except TimeoutError:
        return "no answer"
    finally:
        socket.close(linger=0)
        context.term()


def write_down(said: dict[str, Any]) -> None:
    """One line of the report."""
    with open(orders["report"], "a") as report:
        report.write(json.dumps(said) + "\n")


def main() -> None:
    """Serves, and lies when told to."""
    honest = Membership._on_welcome

    async def remember(self: Membership, said: worker_pb2.Welcome) -> None:
        welcome.CopyFrom(said)
        await honest(self, said)

    Membership._on_welcome = remember  # type: ignore[method-assign]
    paceline.services.rollout.worker.RolloutRun = LyingRun  # type: ignore[misc]
    signal.signal(signal.SIGUSR1, arm)
    paceline.services.rollout.main.main()


if __name__ == "__main__":
    main()
