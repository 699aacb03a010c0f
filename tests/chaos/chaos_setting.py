"""The setting of a campaign: services with proxies between them, on a disk that nothing else uses, and their run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from chaos_watch import coordinator_address
from corruption import Corruption
from disk import Ballast
from faults import LINKS, Fault
from links.network import Network
from links.proxy import Proxy
from lying import LyingWorker

from paceline.calls.token import PORT_VARIABLE
from paceline.services.demo.task import answer, make_model, problem
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.spec.reading import parse_spec

LISTENS = re.compile(r"exchange on tcp://([^,\s]+)")
log = logging.getLogger(__name__)


class Link(Protocol):
    """A part that can be harmed for a while: a proxy, a network."""

    @property
    def met(self) -> Counter[str]:
        """Count how often each harm has met traffic."""
        ...

    def harm(self, kind: str) -> None:
        """Begins to suffer."""
        ...

    def repair(self) -> None:
        """Is whole again."""
        ...


@dataclass
class Setting:
    """The targets of faults."""

    cluster: LocalCluster
    links: dict[str, Link]
    """By name, as in `faults.LINKS`."""
    ballast: Ballast
    corruption: Corruption
    liar: LyingWorker
    suffered: dict[str, Fault] = field(default_factory=dict)
    """By link, while it lasts."""

    def end(self) -> None:
        """Ends the services, when everything is whole again."""
        self.ballast.clear()
        self.liar.end()
        for link in self.links.values():
            link.repair()
        self.cluster.stop()


@contextlib.contextmanager
def tormented(directory: Path, ranks: int, sizes: dict[str, int], apart: bool, seed: int = 0) -> Iterator[Setting]:
    """A cluster whose workers reach both ports of the coordinator through proxies; with `apart`, the rollout workers are
    in a network of their own. `seed` decides which bits are changed."""
    section = ClusterSection(
        rollout_workers=sizes["rollout"],
        reward_workers=sizes["reward"],
        environment_workers=sizes.get("environment", 0),
        learner_ranks=ranks,
    )
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(contextlib.closing(Network())) if apart else None
        near = network.near if network else "127.0.0.1"
        exchange = Proxy(lambda: exchange_address(cluster), messages=True, host=near)
        control = Proxy(lambda: coordinator_address(cluster), host=near)
        for proxy in (exchange, control):
            stack.callback(proxy.close)
        options = {"coordinator": ["--exchange-endpoint", f"tcp://{exchange.address}", "--min-free-mb", "16"]}
        links: dict[str, Link] = {"exchange": exchange, "control": control}
        launchers = {}
        if network:
            links["network"] = network
            options |= {
                "learner": ["--insecure", "--host", network.near],
                "rollout": ["--insecure", "--host", network.far],
                "reward": ["--insecure"],
                "environment": ["--insecure"],
            }
            launchers["rollout"] = network.launcher
        cluster = LocalCluster(directory, section, say=log.info, options=options, launchers=launchers)
        setting = Setting(
            cluster,
            links,
            Ballast(directory),
            Corruption(cluster, seed),
            LyingWorker(directory, control.address),
        )
        stack.callback(setting.end)
        port = cluster.start_coordinator().rpartition(":")[2]
        stack.callback(os.environ.pop, PORT_VARIABLE, None)
        os.environ[PORT_VARIABLE] = port  # workers reach it at the proxy's port
        cluster.address = control.address
        cluster.start_workers()
        yield setting


def exchange_address(cluster: LocalCluster) -> str:
    """Return the address of the newest coordinator's exchange. Raises IndexError before there is one."""
    lines = cluster.log_path("coordinator").read_text().splitlines()
    said = [line for line in lines if "exchange on tcp://" in line]
    return LISTENS.findall(said[-1])[0]


def strike(setting: Setting, fault: Fault, run_id: str) -> bool:
    """Deals out a fault; False when its service is just being restarted, so that nobody was met, and when its link suffers
    from another one."""
    if fault.role in LINKS:
        if fault.role in setting.suffered:
            return False
        setting.suffered[fault.role] = fault
        setting.links[fault.role].harm(fault.kind)
        return True
    if fault.kind == "lie":
        return setting.liar.tell(fault.index, fault.lasts_s)
    if fault.kind == "full":
        setting.ballast.fill()
        return True
    if fault.kind == "corrupt":
        return setting.corruption.strike(fault.role, run_id)
    number = {"kill": signal.SIGKILL, "pause": signal.SIGSTOP, "term": signal.SIGTERM}[fault.kind]
    return setting.cluster.kill(fault.role, fault.index, number)


def repair(setting: Setting, fault: Fault, run_id: str) -> None:
    """Ends a pause, a full disk, or what a link suffers."""
    if fault.role in LINKS:
        setting.links[fault.role].repair()
        del setting.suffered[fault.role]
    elif fault.kind == "full":
        setting.ballast.clear()
    elif fault.kind == "corrupt":
        setting.corruption.repair(fault.role, run_id)
    elif fault.kind != "lie":  # which ends by itself
        setting.cluster.kill(fault.role, fault.index, signal.SIGCONT)


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
