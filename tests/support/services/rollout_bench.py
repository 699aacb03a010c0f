"""A rollout worker's run with a fake engine and a fake exchange, for tests of the run and of its servicer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from exchange_drivers import make_spec

from paceline.groups import Completion, VersionSpan
from paceline.rollout.engine import GenerationRequest, empty_completion
from paceline.services.demo.task import make_tokenizer
from paceline.services.rollout.run import RolloutRun
from paceline.v1 import exchange_pb2 as pb

PATIENCE_S = 60.0
GEMMA = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
TWO_TURNS = '[{"role": "user", "content": "1"}, {"role": "user", "content": "2"}]'
ONE_TURN = '[{"role": "user", "content": "1+1"}]'


class Engine:
    """Engine that answers with one token; `fault` may raise for a request."""

    num_running, num_waiting, capacity, max_batch_size, version = 0, 0, 64, 64, None

    def __init__(self) -> None:
        self.fault: Callable[[GenerationRequest], None] = lambda request: None
        self.asked: list[GenerationRequest] = []
        self.began: asyncio.Queue[str] = asyncio.Queue()
        self.held: asyncio.Event | None = None

    async def generate(self, request: GenerationRequest) -> Completion:
        self.asked.append(request)
        self.began.put_nowait(request.request_id)
        self.fault(request)
        if request.request_id.startswith("probe/"):
            return empty_completion()
        if self.held is not None:
            await self.held.wait()
        span = VersionSpan(1, 0, 0, 1)
        return Completion(np.array([3], np.int32), np.zeros(1, np.float32), (span,), "stop")

    def abort(self, request_id: str) -> None:
        pass

    async def close(self) -> None:
        pass


class Exchange:
    """Exchange that gives the leases in `leases`, and records submissions and returns."""

    def __init__(self) -> None:
        self.leases: asyncio.Queue[tuple[list[pb.Lease], list[bytes]] | None] = asyncio.Queue()
        """None stands for a refusal."""
        self.returned: asyncio.Queue[pb.LeaseReturn | pb.GroupResult] = asyncio.Queue()

    async def request(self, request: pb.ExchangeRequest, payloads: Any = ()) -> Any:
        match request.WhichOneof("body"):
            case "lease":
                given = await self.leases.get()
                if given is None:
                    return pb.ExchangeReply(status=pb.REPLY_STATUS_INVALID, message="failed on it"), []
                leases, frames = given
                return pb.ExchangeReply(status=pb.REPLY_STATUS_OK, lease=pb.LeaseReply(leases=leases)), frames
            case "lease_return":
                self.returned.put_nowait(request.lease_return)
            case "group":
                self.returned.put_nowait(request.group)
        return pb.ExchangeReply(status=pb.REPLY_STATUS_COMMITTED), []

    def give(self, *leases: pb.Lease, frames: tuple[bytes, ...] = ()) -> None:
        self.leases.put_nowait((list(leases), list(frames)))

    async def next(self) -> Any:
        return await asyncio.wait_for(self.returned.get(), PATIENCE_S)


class Bench:
    """A run at work with a fake engine and exchange."""

    def __init__(self, directory: Path) -> None:
        self.engine, self.exchange = Engine(), Exchange()
        tokenizer = make_tokenizer()
        tokenizer.chat_template = GEMMA
        membership: Any = self.exchange
        engine: Any = self.engine
        spec = make_spec(directory)
        self.run = RolloutRun(spec, "run-1", "rollout-1", membership, engine, tokenizer, "/runs/run-1")
        self.working = asyncio.create_task(self.run.generate_forever())


def lease(group_id: int, prompt: str = ONE_TURN, attempt: int = 1, **fields: Any) -> pb.Lease:
    params = {"max_new_tokens": 4, "temperature": 1.0, "top_p": 1.0}
    return pb.Lease(group_id=group_id, attempt=attempt, prompt_json=prompt, num_generations=2, params=params, **fields)
