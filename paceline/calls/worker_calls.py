"""Calls about workers and to workers: who belongs to a coordinator, completions, scores. `paceline.client.Client` has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paceline.calls.connection import Connection
from paceline.errors import InvalidInput, Unavailable

if TYPE_CHECKING:
    from paceline.v1.rollout_pb2 import GeneratedCompletion
    from paceline.v1.worker_pb2 import Member


class WorkerCalls(Connection):
    """The calls about the workers of one coordinator, and to them."""

    def members(self) -> list[Member]:
        """Return every worker that belongs to the coordinator now."""
        from paceline.v1.worker_pb2 import ListMembersRequest

        call = lambda: self._stub().ListMembers(ListMembersRequest(), timeout=self._timeout_s)  # noqa: E731
        return list(self._call(call).members)

    def drain(self, member_id: str, grace_s: float = 60.0) -> int:
        """Tell a worker to finish or return its work within `grace_s` seconds, and to leave; return the number of groups and
        tasks that it holds. Raises NotFound, Unavailable."""
        from paceline.v1.worker_pb2 import WorkerServiceDrainRequest

        request = WorkerServiceDrainRequest(member_id=member_id, grace_s=grace_s)
        return int(self._call(lambda: self._stub().Drain(request, timeout=self._timeout_s)).held)

    def generate(
        self,
        prompt: str,
        *,
        n: int = 1,
        temperature: float | None = None,
        max_new_tokens: int | None = None,
        seed: int = 0,
        worker: str | None = None,
        timeout_s: float = 300.0,
    ) -> list[GeneratedCompletion]:
        """Return `n` completions of a prompt under the newest weights. Omitted parameters take the values of the worker's run.

        `worker` is the host:port of a rollout worker; by default the one with the newest weights. Raises Unavailable
        when there is none, Conflict when it holds no weights yet, InvalidInput.
        """
        if n < 1 or (temperature is not None and temperature <= 0):
            raise InvalidInput(f"n is {n} and temperature {temperature}; both have to be above 0")
        from paceline.v1 import rollout_pb2, rollout_pb2_grpc

        request = rollout_pb2.GenerateRequest(prompt=prompt, n=n, seed=seed)
        if temperature is not None:
            request.params.temperature = temperature
        if max_new_tokens is not None:
            request.params.max_new_tokens = max_new_tokens
        address = worker or self._address_of("ROLE_ROLLOUT")
        with self._channel_to(address) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            reply = self._call(
                lambda: stub.Generate(request, timeout=timeout_s), f"rollout worker at {address}"
            )
        return list(reply.completions)

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        functions: Sequence[str] = (),
        columns: dict[str, list[Any]] | None = None,
        *,
        worker: str | None = None,
        timeout_s: float = 300.0,
    ) -> dict[str, list[float | None]]:
        """Return scores by function, one for each completion, None where the function does not apply.

        `functions` are built-ins or of the current run (default: all of it); `columns` are lists as long as
        `completions`; `worker` is the host:port of a reward worker. Raises Unavailable when there is none.
        """
        from paceline.v1 import reward_pb2, reward_pb2_grpc

        request = reward_pb2.ScoreRequest(
            functions=functions,
            prompts=prompts,
            completions=completions,
            columns_json=json.dumps(columns or {}),
        )
        address = worker or self._address_of("ROLE_REWARD")
        with self._channel_to(address) as channel:
            stub = reward_pb2_grpc.RewardServiceStub(channel)
            reply = self._call(lambda: stub.Score(request, timeout=timeout_s), f"reward worker at {address}")
        return {
            scored.function: [score.value if score.HasField("value") else None for score in scored.scores]
            for scored in reply.scores
        }

    def _address_of(self, role: str) -> str:
        """Return the address of a live worker of the role: the worker with the newest weights."""
        from paceline.v1.common_pb2 import Role

        found = [m for m in self.members() if m.role == Role.Value(role) and m.address]
        if not found:
            kind = role.removeprefix("ROLE_").lower()
            raise Unavailable(f"no {kind} worker with an address belongs to {self.address}; start one with "
                              f"`paceline serve {kind} --coordinator {self.address} --port 0`")  # fmt: skip
        newest = max(found, key=lambda m: (m.HasField("version"), m.version.step, -m.silent_s))
        return str(newest.address)

    def _stub(self) -> Any:
        from paceline.v1.worker_pb2_grpc import WorkerServiceStub

        return WorkerServiceStub(self._channel)
