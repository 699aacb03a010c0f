"""`paceline.train` without services: the spec that it makes, the files that it writes, and how it ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline.calls.token import VARIABLE
from paceline.client import Event, RunState
from paceline.data.rows import open_rows
from paceline.encryption.storage_key import StorageKey
from paceline.errors import InvalidInput, NotFound, PacelineError
from paceline.services.coordinator.lifecycle import worker_faults
from paceline.services.local.one_call import RETRIED, TrainedRun, assembled
from paceline.spec import RewardFunctionSection, RunSpec
from paceline.v1 import run_pb2

MODEL = {"model_name": "none"}


def length(completions: list[str], **_: Any) -> list[float]:
    """Reward of long completions."""
    return [float(len(text)) for text in completions]


class Services:
    """Cluster and coordinator that answer with the given events."""

    def __init__(self, directory: Path, events: list[Event], state: str) -> None:
        self.directory, self.events, self.state = directory, events, state
        self.address, self.on_failure = "127.0.0.1:1", lambda: None
        self.spec: RunSpec | None = None
        self.calls: list[str] = []
        self.sizes: Any = None

    def start(self, directory: Path, sizes: Any, **_: Any) -> Services:
        os.environ.setdefault(VARIABLE, "token of this cluster")
        self.sizes = sizes
        return self

    def connect(self, address: str) -> Services:
        return self

    def __enter__(self) -> Services:
        self.calls.append("begin")
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append("end")

    def close(self) -> None: ...

    def check(self) -> None: ...

    def submit(self, spec: RunSpec) -> Any:
        self.spec = spec
        return SimpleNamespace(run_id="run-1")

    def get(self, run_id: str) -> run_pb2.Run:
        state = run_pb2.RunState.Value(f"RUN_STATE_{self.state.upper()}")
        return run_pb2.Run(run_id=run_id, state=state, directory=str(self.directory), max_num_steps=2, message="why")

    def runs(self) -> list[run_pb2.Run]:
        return [run_pb2.Run(run_id="old-1", state=run_pb2.RUN_STATE_QUEUED)]

    def cancel(self, run_id: str) -> None:
        self.calls.append(f"cancel {run_id}")

    def watch(self, run_id: str) -> Iterator[Event]:
        yield from self.events


def step(number: int, reward: float) -> Event:
    return Event(number, "step", {"step": number, "reward": reward})


def train(services: Services, directory: Path, **more: Any) -> Any:
    return paceline.train(
        policy=MODEL,
        data=[{"prompt": "1+1=", "answer": 2}],
        rewards=[length, "exact_match"],
        directory=directory,
        start_cluster=services.start,
        connect=services.connect,
        **more,
    )


def test_a_run_gives_its_metrics_and_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "summary.json").write_text('{"export_path": "/models/run-1"}')
    evaluation = Event(2, "evaluation", {"step": 2, "reward": 0.75})
    services = Services(tmp_path, [step(0, 0.25), step(1, 0.5), evaluation], "succeeded")
    lines: list[str] = []
    result = train(services, tmp_path, grpo={"max_num_steps": 2}, show=lines.append)
    assert result.metrics == [{"step": 0, "reward": 0.25}, {"step": 1, "reward": 0.5}]
    assert result.evaluations == [{"step": 2, "reward": 0.75}]
    assert result.export_path == Path("/models/run-1")
    assert services.calls == ["begin", "begin", "end", "end"]
    assert lines[0].startswith("run old-1 is still open and goes first")
    assert lines[2:] == ["step 1: reward 0.25", "step 2: reward 0.5", "evaluation of version 2: 0.75"]
    assert services.spec is not None
    assert services.spec.grpo.max_num_steps == 2
    assert [reward.label for reward in services.spec.rewards] == ["length", "exact_match"]
    assert json.loads(Path(str(services.spec.data.train)).read_text()) == {"prompt": "1+1=", "answer": 2}
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("events", "state", "message", "cancelled"),
    [
        ([step(0, 0.5)], "failed", r"run run-1 failed: why; its folder is", True),
        (
            [Event(1, "state", {"state": "paused", "message": "40 groups: KeyError"})],
            "paused",
            r"run run-1 was paused, so it was cancelled: 40 groups: KeyError",
            True,
        ),
    ],
)
def test_a_run_that_does_not_succeed_is_an_error_with_its_reason(
    events: list[Event], state: str, message: str, cancelled: bool, tmp_path: Path
) -> None:
    services = Services(tmp_path, events, state)
    with pytest.raises(PacelineError, match=message):
        train(services, tmp_path, show=None)
    assert ("cancel run-1" in services.calls) == cancelled
    assert services.calls[-2:] == ["end", "end"]


def test_a_pause_that_ends_by_itself_is_waited_for(tmp_path: Path) -> None:
    assert RETRIED == worker_faults.RETRIED
    (tmp_path / "summary.json").write_text("{}")
    paused = Event(1, "state", {"state": "paused", "message": f"no route. {RETRIED}"})
    result = train(Services(tmp_path, [paused, step(0, 1.0)], "succeeded"), tmp_path, show=None)
    assert len(result.metrics) == 1
    assert result.export_path is None


def test_an_interrupted_run_is_cancelled(tmp_path: Path) -> None:
    class Interrupted(Services):
        def watch(self, run_id: str) -> Iterator[Event]:
            yield step(0, 0.5)
            raise KeyboardInterrupt

    services = Interrupted(tmp_path, [], "running")
    with pytest.raises(KeyboardInterrupt):
        train(services, tmp_path, show=None)
    assert services.calls == ["begin", "begin", "cancel run-1", "end", "end"]


def test_a_run_on_examples_has_no_workers(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text("{}")
    services = Services(tmp_path, [], "succeeded")
    rows = [{"prompt": "a", "completion": "b"}]
    paceline.train(
        {"algorithm": "sft", "policy": MODEL},
        data=rows,
        directory=tmp_path,
        show=None,
        start_cluster=services.start,  # type: ignore[arg-type]
        connect=services.connect,  # type: ignore[arg-type]
    )
    assert (services.sizes.rollout_workers, services.sizes.reward_workers) == (0, 0)


def test_sections_are_laid_over_a_file_and_rewards_may_lie_anywhere(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "spec.yaml").write_text(
        "policy: {model_name: none, train_mb_tokens: 64}\ndata: {train: a.jsonl}\nrewards: [{function: length}]\n"
        "grpo: {seed: 7}\n"
    )
    spec = assembled(
        tmp_path / "spec.yaml",
        ["grpo.max_num_steps=3"],
        {"grpo": {"num_prompts_per_step": 5}},
        None,
        None,
        None,
        tmp_path,
    )
    assert (spec.grpo.seed, spec.grpo.max_num_steps, spec.grpo.num_prompts_per_step) == (7, 3, 5)
    assert spec.folder == str(tmp_path)
    weighted = {"function": length, "weight": 0.5}
    whole = RewardFunctionSection(function="exact_match", weight=2.0)
    changed = assembled(spec, (), {}, [weighted, whole], None, None, tmp_path / "runs")
    assert [reward.weight for reward in changed.rewards] == [0.5, 2.0]
    assert changed.folder == ""
    assert changed.rewards[0].function.endswith("test_one_call.py:length")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"overrides": ["grpo.seed=1"]}, "overrides need a spec's file"),
        ({"rewards": [3]}, "a reward is a function or its name, not 3"),
        ({"rewards": [lambda completions: [1.0]]}, "a lambda has no name"),
        ({"data": [{"prompt": {1, 2}}]}, "row 0 of the data cannot be written as JSON"),
        ({"policy": MODEL, "data": "none.jsonl", "rewads": []}, "rewads: unknown key"),
    ],
)
def test_what_cannot_be_a_run_is_refused_before_anything_starts(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def start(*_: object, **__: object) -> Any:
        raise AssertionError("nothing may start")

    with pytest.raises(InvalidInput, match=message):
        paceline.train(directory=tmp_path, show=None, start_cluster=start, **arguments)


def test_names_of_the_package_are_loaded_when_they_are_used() -> None:
    assert paceline.RunState.RUNNING == "running"
    assert paceline.RunState is RunState
    assert "train" in dir(paceline)
    with pytest.raises(AttributeError, match="no attribute 'trian'; it has Client"):
        _ = paceline.trian


def test_rows_are_encrypted_with_a_storage_key(tmp_path: Path, given_key: StorageKey) -> None:
    spec = assembled(
        {"policy": {"model_name": "m"}}, (), {}, ["math_accuracy"], [{"prompt": "planted"}], None, tmp_path
    )
    assert isinstance(spec.data.train, str)
    assert b"planted" not in Path(spec.data.train).read_bytes()
    assert open_rows(spec.data.train, "train")[0] == {"prompt": "planted"}


def test_a_ledger_on_another_machine_is_named(tmp_path: Path) -> None:
    run = TrainedRun("run-1", tmp_path / "runs" / "run-1", None, [], [], {})
    with pytest.raises(NotFound, match=r"ledger\.sqlite is not on this machine; .* `paceline samples run-1 --step 3`"):
        run.samples(3)
