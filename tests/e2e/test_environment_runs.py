"""Runs with an environment on real services: episodes of several turns through the deaths of every process."""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_templates import HERMES
from click.testing import CliRunner
from forked_services import ForkedCluster
from tiny_chat import save_tiny_chat
from transformers import AutoTokenizer

from paceline.client import ENDED_STATES, Client, RunState, state_name
from paceline.services.cli.main import main
from paceline.services.coordinator.audit.verify import verify
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.spec.reading import parse_spec

TURNS, STEPS, GROUPS, SAMPLES = 6, 4, 4, 4
RUN_TIMEOUT_S = 300.0
GAME = f"""
import time

class Game:
    deterministic = True

    def reset(self, number, **_):
        self.number, self.turns, self.letters = number, 0, 0

    def step(self, text):
        time.sleep(0.1)
        self.turns += 1
        self.letters += sum(c.isalpha() for c in text)
        return f"{{self.number}}+{{self.turns}}", None, self.turns == {TURNS}

    def get_reward(self):
        return self.letters / 10
"""
AGENT = """
from openai import AsyncOpenAI

async def solve(row, base_url, api_key):
    messages = list(row["prompt"])
    letters = 0
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for number in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            text = answer.choices[0].message.content or ""
            letters += sum(c.isalpha() for c in text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": str(number)}]
    return letters / 10
"""
TRL = '''
import random

class Increment:
    def reset(self, **kwargs) -> str | None:
        self.counter, self.target = 0, random.randint(1, 6)
        return f"Count to {self.target}."

    def get_reward(self) -> float:
        return float(self.counter == self.target)

    def increment(self, step: int) -> int:
        """
        Adds to the counter.

        Args:
            step: what to add

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter

class Walk:
    def reset(self, **kwargs) -> str:
        return "Reach the goal."

    def move(self, action: str) -> str:
        """Moves.

        Args:
            action: One of "up" and "down".

        Returns:
            What is seen then.
        """
        ...

async def async_add(a: int, b: int) -> int:
    """
    Adds two integers.

    Args:
        a: The first integer.
        b: The second integer.

    Returns:
        Their sum.
    """
    return a + b
'''
"""Environments and a tool in the forms of TRL's documentation: the task is drawn in `reset`, several classes by a column without
prompts, and a function."""
MakeSpec = Callable[..., RunSpec]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Two rollout workers, two environment workers, a reward worker and a learner."""
    sizes = ClusterSection(rollout_workers=2, reward_workers=1, environment_workers=2, learner_ranks=1)
    with ForkedCluster(tmp_path_factory.mktemp("runs"), sizes, max_deaths=5) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with Client(cluster.address) as connected:
        yield connected
        for run in connected.runs():
            if state_name(run) not in ENDED_STATES:
                connected.cancel(run.run_id)


@pytest.fixture(scope="module")
def make_episodes(tmp_path_factory: pytest.TempPathFactory, chat_model: Path) -> MakeSpec:
    """A small spec with an environment; keyword arguments are merged into its sections."""
    folder = tmp_path_factory.mktemp("episodes")
    rows = [{"prompt": [{"role": "user", "content": f"go {n}"}], "number": n} for n in range(40)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "game.py").write_text(GAME)
    (folder / "agent.py").write_text(AGENT)
    (folder / "trl.py").write_text(TRL)

    def make(**sections: Any) -> RunSpec:
        tree: dict[str, Any] = {
            "name": "episodes",
            "policy": {
                "model_name": str(chat_model),
                "max_total_sequence_length": 512,
                "optimizer": {"lr": 1e-3},
                "generation": {"max_new_tokens": 8},
            },
            "data": {"train": "train.jsonl"},
            "environment": {"class": "game.py:Game", "processes": 1},
            "grpo": {
                "num_prompts_per_step": GROUPS,
                "num_generations_per_prompt": SAMPLES,
                "max_num_steps": STEPS,
            },
            "async_grpo": {"max_trajectory_age_steps": 2},
            "checkpointing": {"save_period": 2},
            "logger": {"tensorboard": False},
        }
        for section, values in sections.items():
            tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
        return parse_spec(tree, base=folder)

    return make


def turns_of(cluster: LocalCluster, run_id: str) -> int:
    """Turns that are in the journal."""
    with contextlib.closing(Ledger(cluster.directory / "ledger.sqlite", read_only=True)) as ledger:
        return int(ledger.db.execute("SELECT COUNT(*) FROM episodes WHERE run_id = ?", (run_id,)).fetchone()[0])


def wait_for_turns(cluster: LocalCluster, run_id: str, number: int) -> int:
    """Wait until so many more turns have been journaled; a turn that is pruned with its group does not count."""
    deadline_s, seen, total = time.monotonic() + RUN_TIMEOUT_S, turns_of(cluster, run_id), 0
    while total < number:
        assert time.monotonic() < deadline_s, f"{total} of {number} turns"
        cluster.check()
        time.sleep(0.05)
        now = turns_of(cluster, run_id)
        total += max(0, now - seen)
        seen = now
    return total


def finish(client: Client, cluster: LocalCluster, run_id: str) -> dict[str, Any]:
    """Wait for the run's end, and compare its records with each other. Return its summary."""
    deadline_s = time.monotonic() + RUN_TIMEOUT_S
    while state_name(run := client.get(run_id)) not in ENDED_STATES:
        assert time.monotonic() < deadline_s, f"{run_id} is {state_name(run)} at step {run.step}"
        cluster.check()
        time.sleep(0.1)
    assert RunState.of(run) is RunState.SUCCEEDED, run.message
    with contextlib.closing(Ledger(cluster.directory / "ledger.sqlite", read_only=True)) as ledger:
        assert verify(ledger, run_id).problems == []
    tokens = run.tokens
    assert tokens["generated"] == tokens["trained"] + tokens["dropped"] + tokens["live"]
    return dict(json.loads((Path(run.directory) / "summary.json").read_text()))


def metrics(cluster: LocalCluster, run_id: str) -> list[dict[str, Any]]:
    lines = (cluster.directory / run_id / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "train"]


def restarts(cluster: LocalCluster, run_id: str) -> Counter[str]:
    """Lives that ended before their sample was finished, by reason."""
    with contextlib.closing(Ledger(cluster.directory / "ledger.sqlite", read_only=True)) as ledger:
        rows = ledger.db.execute("SELECT reason FROM restarts WHERE run_id = ?", (run_id,)).fetchall()
    return Counter(row["reason"] for row in rows)


@pytest.mark.merge
@pytest.mark.slow
def test_episodes_are_trained_and_can_be_looked_at(
    client: Client, cluster: LocalCluster, make_episodes: MakeSpec
) -> None:
    run_id = client.submit(make_episodes()).run_id
    summary = finish(client, cluster, run_id)
    assert summary["steps"] == STEPS
    lines = metrics(cluster, run_id)
    assert [line["environment/turns_per_sample"] for line in lines] == [TURNS] * STEPS
    assert all(line["environment/rows_per_sample"] >= 1 for line in lines)
    assert all(line["reward"] > 0 for line in lines)
    assert lines[-1]["environment_workers/bridge_breaks"] >= 0
    assert restarts(cluster, run_id) == Counter()

    shown = CliRunner().invoke(main, ["samples", run_id, "--step", "0", "--directory", str(cluster.directory)])
    assert shown.exit_code == 0, shown.output
    assert "go " in shown.output


@pytest.mark.merge
@pytest.mark.slow
def test_the_run_can_be_trained_again_bit_by_bit(
    client: Client, cluster: LocalCluster, make_episodes: MakeSpec
) -> None:
    run_id = client.submit(make_episodes(grpo={"max_num_steps": 2}, async_grpo={"max_trajectory_age_steps": 0})).run_id
    finish(client, cluster, run_id)
    for line in metrics(cluster, run_id):  # at age 0 the learner is the policy that sampled
        assert line["age"] == 0
        assert line["ratio_behaviour"] == pytest.approx(1, abs=1e-4)
        assert line["kl_behaviour"] < 1e-8
    folder = str(cluster.directory / run_id)
    replayed = CliRunner().invoke(main, ["replay", folder, "--from", "0", "--device", "cpu", "--json"])
    assert replayed.exit_code == 0, replayed.output
    assert json.loads(replayed.output.splitlines()[-1])["identical"] is True


@pytest.mark.merge
@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "data"),
    [
        ({"class": "trl.py:Increment"}, {"prompt_key": ""}),
        ({"class": {"count": "trl.py:Increment", "walk": "trl.py:Walk"}}, {"prompt_key": ""}),
        ({"class": "", "tools": ["trl.py:async_add"]}, {}),
    ],
    ids=["own_task", "several", "tools"],
)
def test_the_forms_of_trl_train(
    client: Client,
    cluster: LocalCluster,
    make_episodes: MakeSpec,
    tmp_path: Path,
    environment: dict[str, Any],
    data: dict[str, Any],
) -> None:
    model = save_tiny_chat(tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = HERMES
    tokenizer.save_pretrained(model)
    rows: list[dict[str, Any]] = [{"environment": name} for name in ("count", "walk") * 10]
    if data.get("prompt_key") != "":
        rows = [{"prompt": [{"role": "user", "content": "1+2"}]}] * 20
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = make_episodes(
        environment={"max_turns": 3, **environment},
        data={"train": str(tmp_path / "rows.jsonl"), **data},
        policy={"model_name": str(model)},
        grpo={"max_num_steps": 1},
        rewards=[] if environment["class"] else [{"function": "length", "kwargs": {"tolerance_tokens": 4}}],
    )
    run_id = client.submit(spec).run_id
    finish(client, cluster, run_id)
    (line,) = metrics(cluster, run_id)
    assert 1 <= line["environment/turns_per_sample"] <= 3
    shown = CliRunner().invoke(main, ["samples", run_id, "--step", "0", "--directory", str(cluster.directory)])
    assert shown.exit_code == 0, shown.output
    assert any(word in shown.output for word in ("Count to", "Reach the goal.", "1+2")), shown.output


@pytest.mark.merge
@pytest.mark.slow
def test_an_agent_trains_by_its_base_url(client: Client, cluster: LocalCluster, make_episodes: MakeSpec) -> None:
    spec = make_episodes(environment={"class": "", "agent": "agent.py:solve"}, grpo={"max_num_steps": 2})
    run_id = client.submit(spec).run_id
    finish(client, cluster, run_id)
    assert all(line["environment/turns_per_sample"] == 3 for line in metrics(cluster, run_id))


@pytest.mark.merge
@pytest.mark.slow
def test_deaths_in_the_middle_of_episodes_cost_no_finished_turn(
    client: Client, cluster: LocalCluster, make_episodes: MakeSpec
) -> None:
    run_id = client.submit(make_episodes(grpo={"max_num_steps": 8})).run_id
    wait_for_turns(cluster, run_id, 40)
    assert cluster.kill("rollout", 0)
    wait_for_turns(cluster, run_id, 40)
    assert cluster.kill("environment", 0)
    wait_for_turns(cluster, run_id, 40)
    assert cluster.kill("coordinator", 0)
    wait_for_turns(cluster, run_id, 40)
    assert cluster.kill("environment", 1)

    summary = finish(client, cluster, run_id)
    assert summary["samples"] == 8 * GROUPS * SAMPLES
    assert restarts(cluster, run_id) == Counter(), "a deterministic environment is replayed"
    assert all(line["environment/turns_per_sample"] == TURNS for line in metrics(cluster, run_id))
