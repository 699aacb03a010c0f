"""`paceline serve reward` (also `paceline-reward`): its options, and `RewardService`, which scores for any client."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import threading
import uuid
from functools import partial
from pathlib import Path
from typing import Any

import click
import grpc

from paceline.errors import Busy, Conflict, InvalidInput, Unavailable
from paceline.host.process import end_with, keep_private
from paceline.reward.builtin import BUILTIN_FUNCTIONS
from paceline.reward.runner import RewardRunner
from paceline.services.common.access.token_guard import worker_guard
from paceline.services.common.options import (
    functions_from_option,
    linux_only,
    only_option,
    token_file_option,
    worker_options,
)
from paceline.services.common.processes.starting import (
    announce,
    die_with_starter,
    raise_file_limit,
    set_library_variables,
)
from paceline.services.common.serving.endpoints import advertised_host
from paceline.services.common.serving.grpc_server import GrpcServer, remind, run_service, with_status
from paceline.services.common.user_code_options import choose_isolation, user_code_options
from paceline.services.common.worker.member_metrics import member_metrics
from paceline.services.reward.worker import RewardWorker
from paceline.spec import RewardFunctionSection
from paceline.tracing import set_up_tracing
from paceline.user_code.left_over import adopt, end_strays
from paceline.user_code.surroundings import remove_left_over
from paceline.v1 import reward_pb2, reward_pb2_grpc

log = logging.getLogger(__name__)


@click.command()
@worker_options("reward", grace="Seconds to finish tasks at SIGTERM.")
@click.option(
    "--processes",
    type=click.IntRange(1, 4096),
    default=1,
    show_default=True,
    help="Number of groups to score at the same time.",
)
@functions_from_option
@only_option
@user_code_options
@token_file_option
@linux_only
def main(
    coordinator: str,
    host: str,
    port: int,
    advertise_host: str,
    name: str,
    processes: int,
    grace_s: float,
    metrics_port: int | None,
    functions_from: tuple[Path, ...],
    only: tuple[str, ...],
    ready_file: Path | None,
) -> None:
    """A reward worker: scores completions for the coordinator's run."""
    die_with_starter()
    keep_private()
    set_library_variables()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    set_up_tracing("reward")
    raise_file_limit()
    warning = choose_isolation(coordinator, host)
    adopt()
    threading.Thread(target=remove_left_over, name="left-over files", daemon=True).start()

    async def serve(stop: asyncio.Event) -> None:
        reachable = advertised_host(host, advertise_host, coordinator)
        worker = RewardWorker(
            coordinator, f"{name}-{uuid.uuid4().hex[:8]}", processes, functions_from=functions_from, only=only
        )
        server = GrpcServer(host, port, worker_guard(coordinator, lambda: worker.membership.call_key))
        servicer = RewardServicer(worker)
        server.add(servicer, reward_pb2_grpc.add_RewardServiceServicer_to_server, "paceline.v1.RewardService")
        worker.address = f"{reachable}:{server.port}"
        worker.assigned.on_readiness = partial(server.set_serving, "paceline.v1.RewardService")
        metrics = member_metrics("reward", worker.membership, host, metrics_port)
        async with server, metrics, asyncio.TaskGroup() as tasks:
            announce(ready_file, worker.address)
            belonging = tasks.create_task(worker.membership.run())
            working = tasks.create_task(worker.work())
            reminding = tasks.create_task(remind(warning))
            await stop.wait()
            worker.membership.draining = True
            worker.stop()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await asyncio.shield(working)
            await worker.membership.leave()
            working.cancel()
            belonging.cancel()
            reminding.cancel()

    try:
        run_service(serve)
    finally:
        end_strays()


Context = grpc.aio.ServicerContext[Any, Any]


MAX_CALLS = 4
MAX_FUNCTIONS = 64
MAX_COMPLETIONS = 4096
MAX_BYTES = 16 << 20


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """Answers the calls of one worker. Each call has its own processes, so tasks of the run do not wait for it."""

    def __init__(self, worker: RewardWorker):
        self._worker = worker
        self._calls = 0

    @with_status
    async def Score(self, request: reward_pb2.ScoreRequest, context: Context) -> reward_pb2.ScoreResponse:
        _check_bounds(request)
        functions = self._functions(list(request.functions))
        count = len(request.completions)
        if request.prompts and len(request.prompts) != count:
            raise InvalidInput(f"prompts has {len(request.prompts)} values for {count} completions")
        prompts = list(request.prompts) or [""] * count
        try:
            columns = json.loads(request.columns_json or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"columns_json is not valid JSON: {error}") from None
        if not isinstance(columns, dict):
            raise InvalidInput(f"columns_json is {type(columns).__name__}, but must be an object of lists")
        if self._calls >= MAX_CALLS:
            raise Busy(
                f"{self._calls} calls are running, and a worker allows no more; try again later, or use another worker"
            )
        self._calls += 1
        try:
            async with RewardRunner(functions) as runner:
                result = await runner.score(prompts, list(request.completions), [[] for _ in range(count)], columns)
        finally:
            self._calls -= 1
        if result.failure is not None:
            passing = result.failure.kind in ("unavailable", "killed")
            raise (Unavailable if passing else InvalidInput)(result.failure.message)
        assert result.rewards_CF is not None
        response = reward_pb2.ScoreResponse()
        for function, values in zip(functions, result.rewards_CF.T.tolist(), strict=True):
            scores = response.scores.add(function=function.label)
            for value in values:
                scores.scores.add(**({} if value != value else {"value": value}))
        return response

    @with_status
    async def ListFunctions(
        self, request: reward_pb2.ListFunctionsRequest, context: Context
    ) -> reward_pb2.ListFunctionsResponse:
        response = reward_pb2.ListFunctionsResponse()
        used = self._worker.functions
        for name, factory in BUILTIN_FUNCTIONS.items():
            response.functions.add(name=name, summary=(factory.__doc__ or "").strip().partition("\n")[0])
        for function in used:
            response.functions.add(name=function.label, summary=function.function, weight=function.weight)
        return response

    def _functions(self, names: list[str]) -> list[RewardFunctionSection]:
        """Return the requested functions: the current run's by name, else built-in ones. A client cannot name a file."""
        used = {function.label: function for function in self._worker.functions}
        if not names and not used:
            raise Conflict("this worker has set up no run; name the functions to score with")
        if self._worker.only and (others := sorted({*names} - {*used} - self._worker.only)):
            raise Conflict(
                f"this worker scores only with {', '.join(sorted(self._worker.only))} (--only), not with {', '.join(others)}; "
                "use another worker"
            )
        for name in names:
            if name not in used and name not in BUILTIN_FUNCTIONS:
                raise InvalidInput(f"no reward function {name!r}; there are {sorted({*used, *BUILTIN_FUNCTIONS})}")
        return [used.get(name, RewardFunctionSection(function=name)) for name in names or used]


def _check_bounds(request: reward_pb2.ScoreRequest) -> None:
    """Raise InvalidInput for a request that is larger than a group can be."""
    bounds = (
        ("functions", len(request.functions), MAX_FUNCTIONS),
        ("completions", len(request.completions), MAX_COMPLETIONS),
        ("prompts", len(request.prompts), MAX_COMPLETIONS),
        ("bytes", request.ByteSize(), MAX_BYTES),
    )
    for name, number, most in bounds:
        if number > most:
            raise InvalidInput(f"the request has {number} {name}, but at most {most} are scored in one call")


console = functools.partial(end_with, main)

if __name__ == "__main__":
    console()
