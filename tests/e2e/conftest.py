"""Real services as processes on loopback, with a model small enough that a run takes seconds."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from dead_services import last_words
from forked_services import ForkedCluster
from tiny_chat import save_tiny_chat
from tls_folders import make_folders

from paceline.client import ENDED_STATES, Client, state_name
from paceline.errors import Conflict
from paceline.services.demo.task import answer, make_model, problem
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.spec.reading import parse_spec
from paceline.tls.folder import VARIABLE

RUN_TIMEOUT_S = 180.0
"""Runs here take some ten seconds; a machine that is busy with other things may need longer."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add to the report of a failed test how the services of its clusters died."""
    report = yield
    if report.failed and call.excinfo is not None:
        used = [*getattr(item, "funcargs", {}).values()]
        used += [value for entry in call.excinfo.traceback for value in entry.locals.values()]
        clusters = {id(value): value for value in used if isinstance(value, LocalCluster)}
        if words := last_words(clusters.values()):
            report.sections.append(("last words of services that died", words))
    return report


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, train.jsonl and validation.jsonl."""
    folder = tmp_path_factory.mktemp("files")
    make_model(folder / "model", seed=0, hidden=32, layers=1, heads=2)
    rows = [{"prompt": problem(a, b), "answer": answer(a, b)} for a in range(0, 100, 3) for b in range(0, 100, 7)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[20:]))
    (folder / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:20]))
    (folder / "rewards.py").write_text(
        "def digits(completions, **columns):\n    return [sum(c.isdigit() for c in text) / 4 for text in completions]\n"
    )
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Certificates of one authority."""
    return make_folders(tmp_path, coordinator="coordinator", **{"pool-a": "worker", "pool-b": "worker"})


@pytest.fixture
def guarded(tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalCluster]:
    """A coordinator alone, under TLS."""
    monkeypatch.setenv("PACELINE_TOKEN_FILE", "")
    monkeypatch.delenv("PACELINE_TOKEN_FILE")
    monkeypatch.setenv(VARIABLE, str(folders["coordinator"]))
    started = ForkedCluster(tmp_path / "runs", ClusterSection())
    try:
        started.start_coordinator()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 over bytes, with its chat template."""
    return save_tiny_chat(tmp_path_factory.mktemp("chat-model"))


@pytest.fixture(scope="module")
def make_spec(files: Path) -> Callable[..., RunSpec]:
    """A small GRPO spec; keyword arguments `section={...}` are merged into its sections."""

    def make(**sections: Any) -> RunSpec:
        tree: dict[str, Any] = {
            "name": "test",
            "policy": {
                "model_name": str(files / "model"),
                "max_total_sequence_length": 32,
                "optimizer": {"lr": 1e-3},
                "generation": {"max_new_tokens": 6},
            },
            "data": {"train": str(files / "train.jsonl"), "validation": str(files / "validation.jsonl")},
            "grpo": {"num_prompts_per_step": 8, "num_generations_per_prompt": 4, "max_num_steps": 12},
            "async_grpo": {"max_trajectory_age_steps": 2},
            "rewards": [{"function": f"{files / 'rewards.py'}:digits"}],
            "checkpointing": {"save_period": 4},
            "logger": {"tensorboard": False},
        }
        for section, values in sections.items():
            tree[section] = {**tree.get(section, {}), **values} if isinstance(values, dict) else values
        return parse_spec(tree)

    return make


@pytest.fixture(scope="module")
def gated(files: Path) -> Callable[[int], tuple[dict[str, Any], Path]]:
    """A reward that scores so many groups and the others only once a file exists, and that file: however late a test
    gets to what it wants to do in the middle of a run, the run has not ended by then. A number in the file lets so many groups
    through; replace the file to write it."""
    numbers = itertools.count()

    def make(groups: int) -> tuple[dict[str, Any], Path]:
        name = f"gate{next(numbers)}"
        gate, source = files / f"{name}.open", files / f"{name}.py"
        source.write_text(
            "import itertools, pathlib, time\n"
            "scored = itertools.count(1)\n"
            "def allowed():\n"
            f"    gate = pathlib.Path({str(gate)!r})\n"
            f"    return float(gate.read_text() or 'inf') if gate.exists() else {groups}\n"
            "def digits(completions, **columns):\n"
            "    number = next(scored)\n"
            "    while number > allowed():\n"
            "        time.sleep(0.02)\n"
            "    return [sum(c.isdigit() for c in text) / 4 for text in completions]\n"
        )
        return {"function": f"{source}:digits", "timeout_s": 2 * RUN_TIMEOUT_S}, gate

    return make


@pytest.fixture(scope="package")
def kept_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], LocalCluster]]:
    """`kept_cluster()`: what `cluster` is, kept from file to file, since it takes long to start; a new one after a service
    of it was given up."""
    sizes = ClusterSection(rollout_workers=2, reward_workers=1, learner_ranks=2)
    kept: list[LocalCluster] = []

    def get() -> LocalCluster:
        if kept and kept[-1].failure is not None:
            kept.pop().stop()
        if not kept:
            kept.append(ForkedCluster(tmp_path_factory.mktemp("runs"), sizes, max_deaths=5).__enter__())
        return kept[-1]

    yield get
    for cluster in kept:
        cluster.stop()


@pytest.fixture(scope="module")
def cluster(kept_cluster: Callable[[], LocalCluster]) -> LocalCluster:
    """Two rollout workers, a reward worker, and a learner of two ranks; it has served other files before."""
    return kept_cluster()


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    """A client of the cluster's coordinator. Whatever run a test leaves behind is cancelled, or the next would wait."""
    with Client(cluster.address) as connected:
        yield connected
        for run in connected.runs():
            if state_name(run) not in ENDED_STATES:
                with contextlib.suppress(Conflict):  # it has just ended
                    connected.cancel(run.run_id)
