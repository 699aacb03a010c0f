"""`make fuzz`: strange messages at every door of a cluster that trains; then the run is judged.

    python tests/fuzz/fuzz.py --messages 100000 --seed 1

Sources (targets.py) send to every rpc, to the exchange and to the HTTP endpoint of a rollout worker, beside a run whose rewards
come slowly until the last message was sent. Then the run goes on to its end, and the judge of `make chaos` compares its records
and replays its weights. The last line is one JSON object: `messages` that were sent, `crashes` (deaths of services),
`run_ended_well`, `resident_growth_mb` of all services together since the warm-up, and by service.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click
import psutil
from targets import Http, Impostor, Rpcs, Strangers

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "chaos"))

from chaos_setting import exchange_address, make_spec  # noqa: E402
from verdict import judge  # noqa: E402

from paceline.client import ENDED_STATES, Client, state_name  # noqa: E402
from paceline.spec import ClusterSection, RunSpec  # noqa: E402
from paceline.token import metadata, read_token  # noqa: E402
from protos.paceline.v1 import common_pb2  # noqa: E402
from services.local.cluster import LocalCluster  # noqa: E402

WARM_UP_SHARE = 0.2
"""Of the messages: what they make the services allocate once does not count."""

SOURCES_EACH = 2
END_S = 240.0
"""The run may take so long to end after the last message."""

ROLES = ("coordinator", "rollout", "reward", "learner")
log = logging.getLogger(__name__)


class Source(Protocol):
    """Sends one message after another."""

    sent: int

    async def send_one(self) -> None:
        """One of them."""

    async def close(self) -> None:
        """Ends it."""


@dataclass
class Found:
    """The result of a campaign."""

    messages: int = 0
    crashes: int = 0
    run_ended_well: bool = False
    resident_growth_mb: float = 0.0
    growth_by_service_mb: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Return whether the promise held; the caller decides how much memory may grow."""
        return self.run_ended_well and self.crashes == 0


def fuzz(directory: Path, *, messages: int, seconds: float, seed: int, steps: int = 60) -> Found:
    """Sends `messages` (or for `seconds`, whichever ends first) at a cluster below `directory`."""
    spec, gate = slow_spec(directory, steps)
    found = Found()
    sizes = ClusterSection(rollout_workers=2, reward_workers=1, learner_ranks=1)
    with LocalCluster(directory / "runs", sizes, say=log.info) as cluster:
        with Client(cluster.address, reconnect_s=120.0) as client:
            run_id = client.submit(spec, wait_s=60.0).run_id
            wait_for_step(client, run_id, 2)
            addresses = {str(m.member_id): m for m in client.members()}
            before = deaths(cluster)
            asyncio.run(send(cluster, run_id, addresses, found, messages, seconds, seed))
            gate.touch()
            stalled = wait_for_end(client, run_id)
        found.crashes = deaths(cluster) - before
    verdict = judge(directory / "runs", run_id, stalled)
    found.problems = verdict.problems
    found.run_ended_well = not verdict.problems and not verdict.stalled
    return found


def slow_spec(directory: Path, steps: int) -> tuple[RunSpec, Path]:
    """A run that trains a step every now and then until a file exists, and that file."""
    spec, gate = make_spec(directory, steps), directory / "gate.open"
    reward = directory / "slow_rewards.py"
    reward.write_text(
        "import pathlib, time\n"
        "def digits(completions, **columns):\n"
        f"    if not pathlib.Path({str(gate)!r}).exists():\n"
        "        time.sleep(0.25)\n"
        "    return [sum(map(str.isdigit, c)) for c in completions]\n"
    )
    rewards = tuple(reward_.model_copy(update={"function": f"{reward}:digits"}) for reward_ in spec.rewards)
    return spec.model_copy(update={"name": "fuzz", "rewards": rewards}), gate


async def send(
    cluster: LocalCluster,
    run_id: str,
    members: dict[str, Any],
    found: Found,
    messages: int,
    seconds: float,
    seed: int,
) -> None:
    """All sources at once, until there are enough messages."""
    credentials = metadata(read_token(cluster.token_file))
    known = {
        "run_id": [run_id],
        "member_id": list(members),
        "protocol": [3],
        "term": [1],
        "session": [1],
        "step": [0, 1, 2, 3],
        "name": ["mine", "checkpoints", "../x"],
        "functions": ["exact_match"],
        "n": [1, 2],
        "max_new_tokens": [1, 4],
        "wait_s": [0.0, 0.1],
        "grace_s": [0.0, 1.0],
        "prompt": ["07+45=", "1"],
        "group_id": list(range(12)),
        "attempt": [1],
        "world_size": [1, 2],
        "rank": [0, 1],
    }
    roles = {
        common_pb2.ROLE_ROLLOUT: "rollout",
        common_pb2.ROLE_REWARD: "reward",
        common_pb2.ROLE_LEARNER: "learner",
    }
    sources: list[Source] = [
        Rpcs("coordinator", cluster.address, f"{seed}/control/{i}", known, credentials)
        for i in range(SOURCES_EACH)
    ]
    for name, member in members.items():
        if member.address:
            sources.append(Rpcs(roles[member.role], member.address, f"{seed}/{name}", known, credentials))
        if member.http_address:
            sources.append(Http(member.http_address, f"{seed}/http/{name}"))
    endpoint = f"tcp://{exchange_address(cluster)}"
    for index in range(SOURCES_EACH):
        sources.append(Strangers(endpoint, f"{seed}/strangers/{index}", known))
        for role, name in roles.items():
            sources.append(Impostor(role, f"fuzz-{name}-{seed}-{index}", cluster.address, known, credentials))
    warm_s, ends_s = time.monotonic() + seconds * WARM_UP_SHARE, time.monotonic() + seconds
    warm: dict[str, float] = {}

    def total() -> int:
        return sum(source.sent for source in sources)

    async def keep_sending(source: Source) -> None:
        while total() < messages and time.monotonic() < ends_s:
            await source.send_one()
            if not warm and (total() >= messages * WARM_UP_SHARE or time.monotonic() > warm_s):
                warm.update(resident_mb(cluster))
            await asyncio.sleep(0)

    try:
        async with asyncio.TaskGroup() as tasks:
            for source in sources:
                tasks.create_task(keep_sending(source))
    finally:
        for source in sources:
            with contextlib.suppress(Exception):  # its server may be gone, which is found out elsewhere
                await source.close()
    found.messages = total()
    now = resident_mb(cluster)
    found.growth_by_service_mb = {name: round(now[name] - warm.get(name, now[name]), 1) for name in now}
    found.resident_growth_mb = round(sum(found.growth_by_service_mb.values()), 1)


def resident_mb(cluster: LocalCluster) -> dict[str, float]:
    """Resident memory of each service with its children."""
    sizes = {}
    for role in ROLES:
        for index, pid in cluster.pids(role).items():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                family = [process, *process.children(recursive=True)]
                sizes[f"{role}-{index}"] = sum(each.memory_info().rss for each in family) / 2**20
    return sizes


def deaths(cluster: LocalCluster) -> int:
    """Count the processes of services that have ended."""
    return sum(len(cluster.deaths(role, index)) for role in ROLES for index in cluster.pids(role))


def wait_for_step(client: Client, run_id: str, step: int) -> None:
    """Until the run trains."""
    for event in client.watch(run_id):
        if event.kind == "step" and event.content["step"] >= step:
            return
    raise AssertionError(f"{run_id} ended before step {step}: {client.get(run_id).message}")


def wait_for_end(client: Client, run_id: str) -> str:
    """Until the run has ended; why it is given up otherwise."""
    deadline_s = time.monotonic() + END_S
    while time.monotonic() < deadline_s:
        run = client.get(run_id)
        if state_name(run) in ENDED_STATES:
            return ""
        time.sleep(0.5)
    return f"{run_id} is {state_name(run)} at step {run.step} after {END_S:.0f} s: {run.message}"


@click.command()
@click.option("--messages", default=100_000, show_default=True, help="Messages to send at most.")
@click.option("--seconds", default=1e9, help="Send for so long at most.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the JSON object on standard output.")
@click.option("--directory", type=click.Path(path_type=Path), help="A new folder; default a temporary one.")
def main(messages: int, seconds: float, seed: int, as_json: bool, directory: Path | None) -> None:
    """Send strange messages at a cluster that trains, then judge its run."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    directory = (directory or Path(tempfile.mkdtemp(prefix="paceline-fuzz-"))).resolve()
    log.info("logs and ledger are in %s", directory)
    found = fuzz(directory, messages=messages, seconds=seconds, seed=seed)
    if not as_json:
        for problem in found.problems:
            click.echo(f"✗ {problem}")
    click.echo(json.dumps(vars(found)))
    raise SystemExit(not found.good)


if __name__ == "__main__":
    main()
