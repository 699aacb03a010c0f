"""`make chaos`: short runs on real processes, killed, stopped and cut off by a seeded schedule, then judged.

    python tests/chaos/campaign.py --faults 100 --seed 1 --directory /tmp/chaos

Ends with a table of what was met in which phase and the line `N faults in M runs: lost 0, trained twice 0, stalled 0,
wrong weights 0`; exit status 1 unless it says so and no records disagree.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import grpc
from disk import Ballast, mount, unmount
from faults import KINDS, ROLES, Fault, schedule
from proxy import Proxy
from verdict import Verdict, judge

from paceline.client import ENDED_STATES, Client
from paceline.demo.model import make_model
from paceline.demo.task import answer, problem
from paceline.errors import PacelineError
from paceline.spec import ClusterSection, RunSpec
from paceline.spec_io import parse_spec
from paceline.up import LocalCluster
from protos.paceline.v1 import learner_pb2, learner_pb2_grpc
from protos.paceline.v1.common_pb2 import Role
from services.coordinator.ledger import Ledger

STALL_S = 240.0
"""A run without a new step for this long after its last fault is given up; a learner needs tens of seconds to start
on a machine that does other things."""

LISTENS = re.compile(r"exchange on tcp://([^,\s]+)")
log = logging.getLogger(__name__)


@dataclass
class Result:
    """What a campaign came to."""

    runs: int = 0
    met: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Faults by role, phase and kind."""
    verdicts: list[Verdict] = field(default_factory=list)
    deaths: int = 0
    """Of services, however they came about."""

    @property
    def faults(self) -> int:
        """How many."""
        return sum(self.met.values())

    @property
    def problems(self) -> list[str]:
        """Everything that is not as promised."""
        return [problem for verdict in self.verdicts for problem in verdict.problems]

    def line(self) -> str:
        """The last line."""
        total = {name: sum(getattr(v, name) for v in self.verdicts) for name in COUNTS}
        counts = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in total.items())
        return f"{self.faults} faults in {self.runs} runs: {counts}"

    def table(self) -> str:
        """Faults by role and phase, one row each, kinds as columns."""
        kinds = sorted({kind for _, _, kind in self.met})
        rows = [f"| role | phase | {' | '.join(kinds)} |", "|---|---|" + "---|" * len(kinds)]
        for role, phase in sorted({(role, phase) for role, phase, _ in self.met}):
            cells = " | ".join(str(self.met[role, phase, kind] or "") for kind in kinds)
            rows.append(f"| {role} | {phase} | {cells} |")
        return "\n".join(rows)

    @property
    def good(self) -> bool:
        """Whether the promise held."""
        return not self.problems and not any(getattr(v, name) for v in self.verdicts for name in COUNTS)


COUNTS = ("lost", "trained_twice", "stalled", "wrong_weights")


@dataclass
class Setting:
    """What faults are dealt out to."""

    cluster: LocalCluster
    links: dict[str, Proxy]
    """By name, as in `faults.LINKS`."""
    ballast: Ballast

    def end(self) -> None:
        """Ends everything."""
        self.ballast.clear()
        self.cluster.stop()
        for proxy in self.links.values():
            proxy.close()


def campaign(
    directory: Path, plan: Iterator[Fault], *, faults: int, steps: int = 40, per_run: int = 10, ranks: int = 1
) -> Result:
    """Runs until `faults` of the plan were dealt out, at most `per_run` to each run of `steps` steps; the learner has
    `ranks` ranks."""
    spec, result = make_spec(directory, steps), Result()
    with tormented(directory / "runs", ranks) as setting:
        cluster = setting.cluster
        while result.faults < faults and not any(verdict.stalled for verdict in result.verdicts):
            with Client(coordinator_address(cluster)) as client:
                run_id = client.submit(spec, wait_s=60.0).run_id
            number = min(per_run, faults - result.faults)
            stalled = torment(setting, run_id, itertools.islice(plan, number), result)
            verdict = judge(cluster.directory, run_id, stalled)
            result.runs += 1
            result.verdicts.append(verdict)
            log.info("%s is judged: %s", run_id, verdict)
        result.deaths = sum(len(cluster.deaths(role, i)) for role, n in ROLES.items() for i in range(n))
    return result


@contextlib.contextmanager
def tormented(directory: Path, ranks: int) -> Iterator[Setting]:
    """A cluster whose workers reach both ports of the coordinator through proxies."""
    sizes = ClusterSection(
        rollout_workers=ROLES["rollout"], reward_workers=ROLES["reward"], learner_ranks=ranks
    )
    exchange = Proxy(lambda: exchange_address(cluster))
    options = ["--exchange-endpoint", f"tcp://{exchange.address}", "--min-free-mb", "16"]
    cluster = LocalCluster(directory, sizes, say=log.info, coordinator_options=options)
    setting = Setting(cluster, {"exchange": exchange}, Ballast(directory))
    try:
        address = cluster.start_coordinator()
        setting.links["control"] = Proxy(lambda: address)
        cluster.address = setting.links["control"].address
        cluster.start_workers()
        yield setting
    finally:
        setting.end()


def exchange_address(cluster: LocalCluster) -> str:
    """Where the newest coordinator's exchange listens. Raises IndexError before there is one."""
    lines = cluster.log_path("coordinator").read_text().splitlines()
    said = [line for line in lines if "exchange on tcp://" in line]
    return LISTENS.findall(said[-1])[0]


def torment(setting: Setting, run_id: str, faults: Iterator[Fault], result: Result) -> str:
    """Deals out the faults while the run goes on, then lets it end; why it was given up, empty when it ended."""
    cluster = setting.cluster
    pause = threading.Event()
    mends: list[tuple[float, Fault]] = []
    fault = next(faults, None)
    due_s = time.monotonic() + (fault.after_s if fault else 0.0)
    step, moved_s = -1, time.monotonic()
    while True:
        now_s = time.monotonic()
        for entry in [entry for entry in mends if entry[0] <= now_s]:
            mends.remove(entry)
            mend(setting, entry[1])
        state, new_step = progress(cluster, run_id)
        if state in ENDED_STATES:
            for _, left in mends:
                mend(setting, left)
            return ""
        if new_step != step or (fault is not None and step >= 1):
            step, moved_s = new_step, now_s
        if cluster.failure is not None:
            return f"a service was given up: {cluster.failure}"
        if now_s - moved_s > STALL_S:
            return f"{run_id} did nothing for {STALL_S:.0f} s at step {step} ({state})"
        if step < 1:
            due_s = now_s + (fault.after_s if fault else 0.0)  # a run that works, not one that starts
        elif fault is not None and now_s >= due_s:
            phase = phase_of(cluster, fault)
            if strike(setting, fault):
                log.info("%s in phase %s at step %d", fault, phase, step)
                result.met[fault.role, phase, fault.kind] += 1
                if fault.lasts_s:
                    mends.append((time.monotonic() + fault.lasts_s, fault))
                fault = next(faults, None)
            due_s = time.monotonic() + (fault.after_s if fault else 0.0)
        pause.wait(0.05)


def strike(setting: Setting, fault: Fault) -> bool:
    """Deals out a fault; False when its service is just being restarted, so that nobody was met."""
    if fault.kind == "cut":
        setting.links[fault.role].cut()
        return True
    if fault.kind == "full":
        setting.ballast.fill()
        return True
    number = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP, "term": signal.SIGTERM}[fault.kind]
    return setting.cluster.kill(fault.role, fault.index, number)


def mend(setting: Setting, fault: Fault) -> None:
    """Ends a pause, a cut or a full disk."""
    if fault.kind == "cut":
        setting.links[fault.role].mend()
    elif fault.kind == "full":
        setting.ballast.clear()
    else:
        setting.cluster.kill(fault.role, fault.index, signal.SIGCONT)


def progress(cluster: LocalCluster, run_id: str) -> tuple[str, int]:
    """State and next step, from the file: also while there is no coordinator."""
    with contextlib.closing(Ledger(cluster.directory / "ledger.sqlite", read_only=True)) as ledger:
        row = ledger.run(run_id)
        return row["state"], row["next_step"]


def coordinator_address(cluster: LocalCluster) -> str:
    """Its own address, not the proxy's."""
    return (cluster.directory / "logs" / "coordinator.address").read_text().strip()


def phase_of(cluster: LocalCluster, fault: Fault) -> str:
    """What the service is doing just before the fault, as far as others can see."""
    try:
        with Client(coordinator_address(cluster), timeout_s=1.0, reconnect_s=0.1) as client:
            members = client.members()
    except PacelineError:
        return "while the coordinator was away"
    if fault.role not in ("rollout", "reward", "learner"):
        return "serving"
    for member in members:
        role = Role.Name(member.role).removeprefix("ROLE_").lower()
        if role == fault.role and member.member_id.startswith(f"{fault.role}-{fault.index}-"):
            if role == "learner":
                return _learner_phase(member.address)
            return "working" if member.held else "waiting"
    return "starting"


def _learner_phase(address: str) -> str:
    with grpc.insecure_channel(address) as channel:
        stub = learner_pb2_grpc.LearnerServiceStub(channel)
        try:
            status = stub.Status(learner_pb2.LearnerServiceStatusRequest(), timeout=1.0)
        except grpc.RpcError:
            return "not answering"
    return str(status.phase)


def make_spec(directory: Path, steps: int) -> RunSpec:
    """A model of a few thousand weights on the task of the demo; a checkpoint every five steps."""
    directory.mkdir(parents=True, exist_ok=True)
    make_model(directory / "model", seed=0, hidden=32, layers=1, heads=2)
    rows = [{"prompt": problem(a, b), "answer": answer(a, b)} for a in range(40) for b in range(0, 40, 3)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = directory / "rewards.py"
    reward.write_text(
        "def digits(completions, **columns):\n    return [sum(map(str.isdigit, c)) for c in completions]\n"
    )
    return parse_spec(
        {
            "name": "chaos",
            "policy": {
                "model_name": str(directory / "model"),
                "max_total_sequence_length": 40,
                "optimizer": {"lr": 1e-3},
                "generation": {"max_new_tokens": 12},
            },
            "data": {"train": str(directory / "train.jsonl")},
            "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_num_steps": steps},
            "async_grpo": {"max_trajectory_age_steps": 2, "late_wait_s": 5.0},
            "rewards": [{"function": f"{reward}:digits"}],
            "weights": {"max_wait_s": 10.0},
            "checkpointing": {"save_period": 5},
            "logger": {"tensorboard": False},
        }
    )


@click.command()
@click.option("--faults", default=100, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--steps", default=40, show_default=True, help="Steps of each run.")
@click.option("--per-run", default=10, show_default=True, help="Faults that one run meets at most.")
@click.option("--ranks", default=2, show_default=True, help="Ranks of the learner.")
@click.option(
    "--disk-mb",
    default=256,
    show_default=True,
    help="Size of the disk that `full` fills (a tmpfs; needs root).",
)
@click.option(
    "--role", "roles", multiple=True, type=click.Choice(list(ROLES)), help="Only this one; repeatable."
)
@click.option(
    "--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="Only this one; repeatable."
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="A new folder for everything; default a temporary one.",
)
def main(
    faults: int,
    seed: int,
    steps: int,
    per_run: int,
    ranks: int,
    disk_mb: int,
    roles: tuple[str, ...],
    kinds: tuple[str, ...],
    directory: Path | None,
) -> None:
    """Torment runs, then judge them."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    directory = directory or Path(tempfile.mkdtemp(prefix="paceline-chaos-"))
    log.info("logs and ledger are in %s", directory)
    directory = directory.resolve()
    mounted = mount(directory / "runs", disk_mb)
    if "full" in kinds and not mounted:
        raise click.UsageError("--kind full needs a disk of its own, and mounting one needs root")
    plan = schedule(seed, roles, kinds or (tuple(KINDS) if mounted else ()))
    result = campaign(directory, plan, faults=faults, steps=steps, per_run=per_run, ranks=ranks)
    if mounted and result.good:
        unmount(directory / "runs")
    click.echo(result.table())
    longest_s = max((verdict.longest_wait_s for verdict in result.verdicts), default=0.0)
    click.echo(
        f"seed {seed}; {result.deaths} deaths of services; longest wait of the learner for data {longest_s:.1f} s"
    )
    for problem_text in result.problems:
        click.echo(f"✗ {problem_text}")
    click.echo(result.line())
    raise SystemExit(not result.good)


if __name__ == "__main__":
    main()
