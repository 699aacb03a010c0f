"""The campaign `fuzz`: strange messages and floods at every port of a deployment that trains; then the run is judged.

    python tests/fuzz/fuzz.py --messages 100000 --connections 1000 --seed 1

Sources (targets.py, http_targets.py, raw_frames.py) send to the exchange, to every rpc of every service and to every HTTP port, and
floods (floods.py) open connections that say nothing, leave answers unread and submit runs by the hundred; all beside a run whose
rewards come slowly until the last message was sent. Then the run goes on to its end, and the judge of the campaign `chaos` compares its
records and replays its weights. Everything is on loopback and bounded in number and time.

The last line is one JSON object: what was sent at each kind of port, `crashes` (deaths of services), `run_ended_well`, the growth of
each service's resident memory since the warm-up (`growth_mb`), and `problems`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import click

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "chaos"))

from chaos_setting import make_spec  # noqa: E402
from doors import Deployment  # noqa: E402
from floods import half_open, submissions, unread, unread_watches  # noqa: E402
from http_targets import AgentReaders, Http, Metrics, Page  # noqa: E402
from raw_frames import RawFrames  # noqa: E402
from targets import Impostor, Rpcs, Strangers  # noqa: E402
from verdict import judge  # noqa: E402

from paceline.calls.token import Metadata, metadata, read_token  # noqa: E402
from paceline.client import ENDED_STATES, Client, state_name  # noqa: E402
from paceline.services.common.serving.call_limits import STEERING, STREAM  # noqa: E402
from paceline.spec import ClusterSection, RunSpec  # noqa: E402
from paceline.spec.reading import spec_to_yaml  # noqa: E402
from paceline.v1 import common_pb2  # noqa: E402

WARM_UP_SHARE = 0.2
"""Share of the messages that belong to the warm-up, with a first round of floods: what they make the services allocate once does
not count."""

WARM_UP_SUBMISSIONS = 64

MAX_GROWTH_MB = 50.0
"""Growth of one service's resident memory since the warm-up."""

SETTLES_S = 60.0
"""Seconds in which a service has given back what a flood took."""

END_S = 240.0
"""The run may take so long to end after the last message."""

SLOW_S = 30.0
"""Time of a step while messages are sent: the run has to last longer than they do."""

SPARE_FILES = 200
log = logging.getLogger(__name__)


class Source(Protocol):
    """Sends one message after another."""

    sent: int

    async def send_one(self) -> None:
        """One of them."""

    async def close(self) -> None:
        """Ends it."""


@dataclass(frozen=True)
class Amount:
    """The size of a campaign."""

    messages: int
    """Frames for the exchange, one or more in a message; every other port gets a fiftieth as messages."""
    connections: int
    """Connections of a flood, at each port in turn."""
    submissions: int = 2 * STEERING.burst
    seconds: float = 1e9
    """Longest time of sending."""


@dataclass
class Found:
    """The result of a campaign."""

    sent: dict[str, int] = field(default_factory=dict)
    """Messages by kind of port."""
    half_open: int = 0
    unread: int = 0
    watches: dict[str, int] = field(default_factory=dict)
    submissions: dict[str, int] = field(default_factory=dict)
    crashes: int = 0
    run_ended_well: bool = False
    growth_mb: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Return whether the promise held."""
        return self.run_ended_well and self.crashes == 0 and not self.problems


def fuzz(directory: Path, amount: Amount, *, seed: int, steps: int = 60, rollouts: int = 2) -> Found:
    """Send at a deployment below `directory`."""
    spec, slow = slow_spec(directory, steps)
    found = Found()
    sizes = ClusterSection(rollout_workers=rollouts, reward_workers=1, environment_workers=1, learner_ranks=1)
    with Deployment(directory, directory / "model", sizes, log.info) as deployment:
        cluster = deployment.cluster
        with Client(cluster.address, reconnect_s=120.0, timeout_s=120.0) as client:
            run_id = client.submit(spec, wait_s=60.0).run_id
            wait_for_step(client, run_id, 2)
            slow.touch()
            members = {str(m.member_id): m for m in client.members()}
            campaign = Campaign(deployment, members, spec, run_id, amount, seed, found)
            asyncio.run(campaign.run())
            cancel_queued(client, run_id)
            slow.unlink()
            stalled = wait_for_end(client, run_id)
        deaths = deployment.deaths()
    found.crashes = len(deaths)
    verdict = judge(directory / "runs", run_id, stalled)
    found.problems += [*deaths, *deployment.unforeseen(), *verdict.problems]
    found.run_ended_well = not verdict.problems and not verdict.stalled
    return found


def slow_spec(directory: Path, steps: int) -> tuple[RunSpec, Path]:
    """A run that trains a step every SLOW_S seconds or so while a file exists, and that file."""
    spec, slow = make_spec(directory, steps), directory / "slow"
    groups = spec.grpo.num_prompts_per_step
    reward = directory / "slow_rewards.py"
    reward.write_text(
        "import pathlib, time\n"
        "def digits(completions, **columns):\n"
        f"    if pathlib.Path({str(slow)!r}).exists():\n"
        f"        time.sleep({SLOW_S / groups})\n"
        "    return [sum(map(str.isdigit, c)) for c in completions]\n"
    )
    rewards = tuple(reward_.model_copy(update={"function": f"{reward}:digits"}) for reward_ in spec.rewards)
    return spec.model_copy(update={"name": "fuzz", "rewards": rewards}), slow


class Campaign:
    """All that is sent at one deployment."""

    def __init__(
        self,
        deployment: Deployment,
        members: dict[str, Any],
        spec: RunSpec,
        run_id: str,
        amount: Amount,
        seed: int,
        found: Found,
    ):
        self._deployment, self._run_id = deployment, run_id
        self._amount, self._seed, self._found = amount, seed, found
        self._flood_spec = spec_to_yaml(spec.model_copy(update={"name": "flood"}))
        self._ports = deployment.ports(members)
        self._token = read_token(deployment.cluster.token_file)
        self._credentials: Metadata = metadata(self._token)
        self._known = known_values(run_id, members)
        self._ends_s = time.monotonic() + amount.seconds

    async def run(self) -> None:
        """Warm up, look at the memory, send the rest, and look again."""
        sources = self._sources()
        try:
            await self._send(sources, WARM_UP_SHARE)
            await asyncio.sleep(1.0)
            warm = self._deployment.resident_mb()
            await self._send(sources, 1.0)
        finally:
            for _, source, _ in sources:
                with contextlib.suppress(Exception):  # its server may be gone, which is found out elsewhere
                    await source.close()
        if not all(source.joined for _, source, _ in sources if isinstance(source, Impostor)):
            self._found.problems.append("not every impostor became a member")
        counts: Counter[str] = Counter()
        for kind, source, _ in sources:
            counts[kind] += source.sent
        self._found.sent = dict(counts)
        await self._settle(warm)

    async def _settle(self, warm: dict[str, float]) -> None:
        """Note the growth of each service, once it is within its bound or the time is over."""
        deadline_s = time.monotonic() + SETTLES_S
        while True:
            now = self._deployment.resident_mb()
            growth = {name: round(now[name] - warm.get(name, now[name]), 1) for name in now}
            too_large = {name: mb for name, mb in growth.items() if mb > MAX_GROWTH_MB}
            if not too_large or time.monotonic() > deadline_s:
                break
            await asyncio.sleep(1.0)
        self._found.growth_mb = growth
        self._found.problems += [f"{name} grew by {mb} MB" for name, mb in too_large.items()]

    async def _send(self, sources: Sequence[tuple[str, Source, int]], share: float) -> None:
        """Send each source's quota up to a share of it, with the floods beside them."""

        async def keep_sending(source: Source, until: float) -> None:
            while source.sent < until and time.monotonic() < self._ends_s:
                await source.send_one()
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            for _, source, quota in sources:
                tasks.create_task(keep_sending(source, share * quota))
            tasks.create_task(self._flood(share))

    async def _flood(self, share: float) -> None:
        """A round of floods: at one port after another, then watches; then submissions."""
        number = self._amount.connections
        for port in self._ports:
            opened, fault = await half_open(port, number, self._seed)
            self._found.half_open += opened
            self._found.problems += [fault] if fault else []
            if port.unread_path:
                self._found.unread += await unread(port, number // 10)
        address = self._deployment.cluster.address
        number = STREAM.under_way + 20
        watches = await unread_watches(address, self._run_id, number, self._credentials)
        self._found.watches = dict(watches)
        if not watches["refused"]:
            self._found.problems.append(f"none of {number} watches of one caller was refused")
        if share < 1.0:  # the libraries of a submission, and the heaps of its threads
            await submissions(address, self._flood_spec, WARM_UP_SUBMISSIONS, self._credentials)
            return
        submitted = await submissions(address, self._flood_spec, self._amount.submissions, self._credentials)
        self._found.submissions = dict(submitted)
        if submitted["without hint"] or not submitted["RESOURCE_EXHAUSTED"]:
            self._found.problems.append(f"submissions were not refused as they should be: {submitted}")

    def _sources(self) -> list[tuple[str, Source, int]]:
        """Return sources with their kind and quota."""
        seed, known, messages = self._seed, self._known, self._amount.messages
        found: list[tuple[str, Source, int]] = []
        for port in self._ports:
            name, quota = f"{seed}/{port.service}/{port.address}", messages // 50
            match port.kind:
                case "exchange":
                    found += self._exchange_sources(f"tcp://{port.address}")
                case "grpc":
                    parts = 2 if port.service == "coordinator" else 1
                    found += [
                        (
                            "grpc",
                            Rpcs(port.service, port.address, f"{name}/{i}", known, self._credentials),
                            quota,
                        )
                        for i in range(parts)
                    ]
                case "endpoint":
                    found.append(("endpoint", Http(port.address, name), quota))
                case "page":
                    found.append(("page", Page(port.address, name, known, self._token), quota))
                case "metrics":
                    found.append(("metrics", Metrics(port.address, name), quota // 5))
                case "agent":
                    found.append(("agent", AgentReaders(port.address, name, known), quota))
        return found

    def _exchange_sources(self, endpoint: str) -> list[tuple[str, Source, int]]:
        seed, known, messages = self._seed, self._known, self._amount.messages
        found: list[tuple[str, Source, int]] = []
        for index in range(2):
            found.append(("exchange", Strangers(endpoint, f"{seed}/strangers/{index}", known), 3 * messages // 10))
            found.append(("exchange", RawFrames(endpoint, f"{seed}/raw/{index}"), messages // 10))
        roles = {1: common_pb2.ROLE_ROLLOUT, 2: common_pb2.ROLE_REWARD, 3: common_pb2.ROLE_LEARNER}
        address = self._deployment.cluster.address
        for number, role in roles.items():
            impostor = Impostor(role, f"fuzz-{number}-{seed}", address, known, self._credentials)
            found.append(("exchange", impostor, -(-messages // 15)))
        return found


def known_values(run_id: str, members: dict[str, Any]) -> dict[str, Sequence[Any]]:
    """Return values that a receiver knows, by the name of a field."""
    return {
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
        "spec_yaml": ABSURD_SPECS,
        "metricName": ["workers", "x"],
        "page_size": [0, 1, 2**32 - 1],
    }


ABSURD_SPECS = (
    "[" * 5000,
    "a: &a [1, 1]\nb: &b [*a, *a]\nc: [*b, *b]",
    "? " * 3000,
    "name: x\n" * 500,
    f"name: {'9' * 5000}",
    "name: !!python/object/apply:os.system [x]",
    "name: x\ngrpo: {max_num_steps: .inf}\n",
    "name: x\ndata: {train: /etc/passwd}\npolicy: {model_name: /proc/self/mem}\n",
    "\x00",
    "- " * 30_000,
)
"""Texts that are specs as little as they can be."""


def cancel_queued(client: Client, run_id: str) -> None:
    """Cancel the runs that the flood has queued, at the pace that the coordinator allows."""
    for run in client.runs():
        if run.run_id != run_id and state_name(run) not in ENDED_STATES:
            client.cancel(run.run_id)


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


def raise_file_limit(connections: int) -> None:
    """Let this process open as many connections as a flood has. Raises click.UsageError where it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + SPARE_FILES
    if hard < needed:
        raise click.UsageError(f"--connections {connections} needs {needed} open files, and this system allows {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))


@click.command()
@click.option(
    "--messages",
    default=100_000,
    show_default=True,
    help="Frames for the exchange; every other port gets a fiftieth.",
)
@click.option("--connections", default=1000, show_default=True, help="Half-open connections at each port in turn.")
@click.option("--submissions", default=10 * STEERING.burst, show_default=True, help="Submissions as fast as they go.")
@click.option("--seconds", default=1e9, help="Send for so long at most.")
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print nothing but the JSON object on standard output.")
@click.option("--directory", type=click.Path(path_type=Path), help="A new folder; default a temporary one.")
def main(
    messages: int,
    connections: int,
    submissions: int,
    seconds: float,
    seed: int,
    as_json: bool,
    directory: Path | None,
) -> None:
    """Send strange messages and floods at a deployment that trains, then judge its run."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    directory = (directory or Path(tempfile.mkdtemp(prefix="paceline-fuzz-"))).resolve()
    directory.mkdir(parents=True, exist_ok=True)
    log.info("logs and ledger are in %s", directory)
    raise_file_limit(connections)
    found = fuzz(directory, Amount(messages, connections, submissions, seconds), seed=seed)
    if not as_json:
        for problem in found.problems:
            click.echo(f"✗ {problem}")
    click.echo(json.dumps(vars(found)))
    raise SystemExit(not found.good)


if __name__ == "__main__":
    main()
