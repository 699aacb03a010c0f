"""The campaign `chaos`: short runs on real processes, killed, stopped and cut off by a seeded schedule, over links that lose, delay,
tear and repeat what crosses them; then judged.

    python tests/chaos/campaign.py --faults 100 --seed 1 --directory /tmp/chaos

Ends with a table of what was met in which phase and the line `N faults in M runs: lost 0, trained twice 0, stalled 0,
wrong weights 0`; exit status 1 unless it says so and no records disagree. Before it: the longest time between two trained
steps by a clock outside of the services, and what was generated more than once.

    python tests/chaos/campaign.py --kind corrupt --faults 20

changes single bits of segments, checkpoints, manifests, the SQLite file and exported models instead, and

    python tests/chaos/campaign.py --role rollout --role reward --workers 3 --leave 2

shows the longest pause of the learner while two workers of each kind are left.

    python tests/chaos/campaign.py --environments

runs episodes of 20 turns, kills rollout and environment workers, and ends with the line `turns lost per kill at most N`: of
one session, by the environment's own record (episodes.py).
"""

from __future__ import annotations

import logging
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click
import episodes
from chaos_setting import Setting, make_spec, repair, strike, tormented
from chaos_watch import (
    UNKNOWN_STEP,
    StepClock,
    coordinator_address,
    is_whole,
    phase_of,
    progress,
    whole_others,
)
from disk import mount, unmount
from faults import KINDS, LINKS, ROLES, Fault, schedule
from links import network
from verdict import Verdict, judge

from paceline.client import ENDED_STATES, Client

STALL_S = 240.0
"""A run without a new step for this long after its last fault is given up; a learner needs tens of seconds to start
on a machine that does other things."""

log = logging.getLogger(__name__)


@dataclass
class Result:
    """The result of a campaign."""

    runs: int = 0
    met: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """Faults by role, phase and kind."""
    verdicts: list[Verdict] = field(default_factory=list)
    deaths: int = 0
    """Of services, however they came about."""
    longest_step_s: float = 0.0
    """Longest time between two trained steps, by a clock outside of the services."""
    on_links: dict[str, Counter[str]] = field(default_factory=dict)
    """Traffic that the faults of each link have met."""
    lost_turns: list[int] = field(default_factory=list)
    """With episodes: turns of each episode that was cut off that were sampled again."""
    broken_turns: int = 0
    """With episodes: turns that were being sampled when their rollout worker died, as far as a step has reported them."""

    @property
    def faults(self) -> int:
        """Number of faults."""
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

    def traffic(self) -> str:
        """Describe the traffic that the faults of links have met."""
        return "; ".join(
            f"{link}: {', '.join(f'{what} {number}' for what, number in sorted(met.items())) or 'nothing'}"
            for link, met in sorted(self.on_links.items())
        )

    def turns(self) -> str:
        """The line about turns."""
        return f"turns lost per kill at most {max([*self.lost_turns, int(self.broken_turns > 0)])}"

    @property
    def good(self) -> bool:
        """Return whether the promise held."""
        return not self.problems and not any(getattr(v, name) for v in self.verdicts for name in COUNTS)


COUNTS = ("lost", "trained_twice", "stalled", "wrong_weights")


def campaign(
    directory: Path,
    plan: Iterator[Fault],
    *,
    faults: int,
    steps: int = 40,
    per_run: int = 10,
    ranks: int = 1,
    sizes: dict[str, int] = ROLES,
    leave: int = 0,
    minutes: float = 1e9,
    apart: bool = False,
    seed: int = 0,
    environments: bool = False,
) -> Result:
    """Runs until `faults` of the plan were dealt out, at most `per_run` to each run of `steps` steps; the learner has
    `ranks` ranks, every role as many services as `sizes` says. A rollout, reward or environment worker is met only when `leave`
    others of its role are whole. After `minutes` no further run is begun. With `apart`, the rollout workers have a network of their
    own. With `environments` the runs have episodes.
    """
    make = episodes.make_spec if environments else make_spec
    spec, result, end_s = make(directory, steps), Result(), time.monotonic() + 60 * minutes
    upcoming = Upcoming(plan)
    with tormented(directory / "runs", ranks, sizes, apart, seed) as setting:
        cluster = setting.cluster
        while result.faults < faults and time.monotonic() < end_s:
            if any(verdict.stalled for verdict in result.verdicts):
                break
            with Client(coordinator_address(cluster)) as client:
                run_id = client.submit(spec, wait_s=60.0).run_id
            number = min(per_run, faults - result.faults)
            with StepClock(cluster, run_id) as clock:
                stalled = torment(setting, run_id, upcoming, number, result, leave)
            result.longest_step_s = max(result.longest_step_s, clock.longest_s)
            verdict = judge(cluster.directory, run_id, stalled)
            verdict.problems += setting.corruption.not_found
            setting.corruption.not_found.clear()
            verdict.problems += setting.liar.believed(run_id)
            if environments:
                result.broken_turns += episodes.broken_turns(cluster.directory / run_id)
            result.runs += 1
            result.verdicts.append(verdict)
            log.info(
                "%s is judged: %s; %.1f s before step %d ended",
                run_id,
                verdict,
                clock.longest_s,
                clock.at_step,
            )
        result.on_links = {name: link.met for name, link in setting.links.items()}
        result.deaths = sum(len(cluster.deaths(role, i)) for role, n in sizes.items() for i in range(n))
    if environments:
        result.lost_turns = episodes.lost_turns(episodes.played(directory))
    return result


class Upcoming:
    """The faults of a plan in their order: one that a run did not live to see is the next run's first."""

    def __init__(self, plan: Iterator[Fault]):
        self._plan = plan
        self._first: Fault | None = None

    def first(self) -> Fault | None:
        """The next one, if there is one."""
        if self._first is None:
            self._first = next(self._plan, None)
        return self._first

    def dealt(self) -> None:
        """The first has struck."""
        self._first = None


def torment(setting: Setting, run_id: str, upcoming: Upcoming, at_most: int, result: Result, leave: int = 0) -> str:
    """Deals out up to `at_most` faults while the run goes on, then lets it end; why it was given up, empty when it ended."""
    cluster = setting.cluster
    pause = threading.Event()
    repairs: list[tuple[float, Fault]] = []
    fault = upcoming.first()
    due_s = time.monotonic() + (fault.after_s if fault else 0.0)
    step, moved_s = -1, time.monotonic()
    while True:
        now_s = time.monotonic()
        for entry in [entry for entry in repairs if entry[0] <= now_s]:
            repairs.remove(entry)
            repair(setting, entry[1], run_id)
        state, new_step = progress(cluster, run_id)
        if state in ENDED_STATES and not (state == "failed" and repairs):
            for _, left in repairs:
                repair(setting, left, run_id)
            return ""
        if new_step not in (step, UNKNOWN_STEP):
            step, moved_s = new_step, now_s
        if cluster.failure is not None:
            return f"a service was given up: {cluster.failure}"
        if now_s - moved_s > STALL_S:
            return f"{run_id} did nothing for {STALL_S:.0f} s at step {step} ({state})"
        if step < 1:
            due_s = now_s + (fault.after_s if fault else 0.0)  # a run that works, not one that starts
        elif fault is not None and now_s >= due_s and may_strike(setting, fault, repairs, leave):
            phase = phase_of(cluster, fault)
            if strike(setting, fault, run_id):
                log.info("%s in phase %s at step %d", fault, phase, step)
                result.met[fault.role, phase, fault.kind] += 1
                moved_s = time.monotonic()
                if fault.lasts_s:
                    repairs.append((moved_s + fault.lasts_s, fault))
                upcoming.dealt()
                at_most -= 1
                fault = upcoming.first() if at_most else None
            due_s = time.monotonic() + (fault.after_s if fault else 0.0)
        pause.wait(0.05)


def may_strike(setting: Setting, fault: Fault, repairs: list[tuple[float, Fault]], leave: int) -> bool:
    """Return whether enough others of the fault's role are left; with episodes also whether it would meet any."""
    if leave == 0 or fault.role not in ("rollout", "reward", "environment"):
        return True
    paused = {(other.role, other.index) for _, other in repairs}
    if setting.cluster.cluster.environment_workers and not is_whole(setting.cluster, fault):
        return False
    return whole_others(setting.cluster, fault, paused) >= leave


@click.command()
@click.option("--faults", default=100, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--steps", type=int, help=f"Steps of each run; default 40, with episodes {episodes.STEPS}.")
@click.option("--per-run", default=10, show_default=True, help="Faults that one run meets at most.")
@click.option("--ranks", default=2, show_default=True, help="Ranks of the learner.")
@click.option("--workers", default=2, show_default=True, help="Rollout workers, and as many reward workers.")
@click.option(
    "--leave",
    type=int,
    help="Meet a rollout, reward or environment worker only when so many others of its role are whole; default 0, with episodes 1, "
    "because kills of workers that start would meet no turn.",
)
@click.option(
    "--pace", default=1.0, show_default=True, help="Makes the time from fault to fault, 0.2 to 2.5 s, longer."
)
@click.option("--minutes", default=1e9, help="Begin no further run after so many.")
@click.option(
    "--disk-mb",
    default=256,
    show_default=True,
    help="Size of the disk that `full` fills (a tmpfs; needs root).",
)
@click.option(
    "--role",
    "roles",
    multiple=True,
    type=click.Choice([*ROLES, "environment"]),
    help="Only this one; repeatable.",
)
@click.option("--kind", "kinds", multiple=True, type=click.Choice(list(KINDS)), help="Only this one; repeatable.")
@click.option(
    "--environments",
    is_flag=True,
    help="Run episodes of 20 turns, and kill rollout and environment workers unless --role or --kind say otherwise.",
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="A new folder for everything; default a temporary one.",
)
def main(
    faults: int,
    seed: int,
    steps: int | None,
    per_run: int,
    ranks: int,
    workers: int,
    leave: int | None,
    pace: float,
    minutes: float,
    disk_mb: int,
    roles: tuple[str, ...],
    kinds: tuple[str, ...],
    environments: bool,
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
    leave = int(environments) if leave is None else leave
    if leave >= workers:
        raise click.UsageError(f"--leave {leave} of --workers {workers} leaves none that may be met")
    if lacking := network.missing():
        log.info("without a network of the rollout workers' own: %s", lacking)
    links = tuple(link for link in LINKS if link != "network" or not lacking)
    sizes = ROLES | {"rollout": workers, "reward": workers}
    if environments:
        sizes, roles, kinds = (
            episodes.SIZES | {"rollout": workers},
            roles or episodes.ROLES,
            kinds or episodes.KINDS,
        )
        ranks = episodes.SIZES["learner"]
    elif "environment" in roles:
        raise click.UsageError("--role environment goes with --environments")
    plan = schedule(
        seed,
        roles,
        kinds or (tuple(kind for kind in KINDS if kind != "corrupt") if mounted else ()),
        sizes,
        pace,
        links,
    )
    result = campaign(
        directory,
        plan,
        faults=faults,
        steps=steps or (episodes.STEPS if environments else 40),
        per_run=per_run,
        ranks=ranks,
        sizes=sizes,
        leave=leave,
        minutes=minutes,
        apart=not lacking,
        seed=seed,
        environments=environments,
    )
    if mounted and result.good:
        unmount(directory / "runs")
    click.echo(result.table())
    replayed, again, wasted = (
        sum(getattr(verdict, name) for verdict in result.verdicts)
        for name in ("replayed_steps", "leased_again", "wasted_tokens")
    )
    click.echo(f"seed {seed}; {result.deaths} deaths of services; longest step {result.longest_step_s:.1f} s")
    click.echo(
        f"{replayed} steps trained in more than one session, {again} of their groups leased more than once; "
        f"tokens generated that no commit took {wasted}"
    )
    click.echo(f"on the links, {result.traffic()}")
    for problem_text in result.problems:
        click.echo(f"✗ {problem_text}")
    click.echo(result.line())
    if environments:
        click.echo(result.turns())
    raise SystemExit(not result.good)


if __name__ == "__main__":
    main()
