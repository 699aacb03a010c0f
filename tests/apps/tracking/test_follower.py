"""Sending of a run: in order, once, through faults of the tracker."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tracker_servers import RUN_ID, RecordedRun

from paceline.apps.tracking.follower import Cursor, Follower, Setting, Target, is_done
from paceline.apps.tracking.tracker import AlertKind, Refused, Row, Step, TrackedRun, Tracker
from paceline.encryption.storage_key import StorageKey
from paceline.errors import Conflict, NotFound, Unreadable
from paceline.spec.sections.system import TrackerSection

SETTING = TrackerSection(kind="wandb")


class Recording:
    """A tracker that keeps what it got over all its lives, and fails as told."""

    url = "http://tracker.test/run"

    def __init__(self) -> None:
        self.got: list[tuple[int, dict[str, float]]] = []
        self.samples: list[Row] = []
        self.alerts: list[str] = []
        self.states: list[str] = []
        self.runs: list[TrackedRun] = []
        self.fail_before: set[int] = set()
        self.fail_after: set[int] = set()
        self.refused: set[int] = set()
        self.known: int | None = None
        self.reached = threading.Event()
        """Set once something was sent."""

    def open(self, setting: Setting, run: TrackedRun, folder: Path) -> Tracker:
        self.runs.append(run)
        return self

    def position(self) -> int | None:
        return self.known

    def log(self, step: Step, metrics: Mapping[str, float], samples: Sequence[Row]) -> None:
        if step.number in self.refused:
            raise Refused("a name that it does not take")
        if step.number in self.fail_before:
            self.fail_before.remove(step.number)
            raise ConnectionError("away")
        self.got.append((step.number, dict(metrics)))
        self.samples += samples
        if self.known is not None:
            self.known = step.sequence
        if step.number in self.fail_after:
            self.fail_after.remove(step.number)
            raise TimeoutError("it was taken, and the answer is lost")
        self.reached.set()

    def alert(self, step: Step, kind: AlertKind, text: str) -> None:
        self.alerts.append(f"{kind}: {text}")

    def change_state(self, step: Step, state: str, message: str) -> None:
        self.states.append(f"{state} {message}".strip())

    def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RecordedRun]:
    recorded = RecordedRun(tmp_path)
    yield recorded
    recorded.close()


def follower(run: RecordedRun, tracker: Recording, folder: Path, *, only_now: bool = False) -> Follower:
    target = Target(RUN_ID, SETTING.kind, SETTING, folder, {"ledger": "here"}, only_now)
    return Follower(target, run.records(), tracker.open, first_backoff_s=0.01, poll_s=0.02)


def test_everything_is_sent_once_and_in_order(run: RecordedRun, tmp_path: Path) -> None:
    run.add_steps(3)
    run.add("warning", message="look \x1b[31m at this")
    run.add("warning", message="low", rule="reward < 1", metric="reward", value=0.5)
    run.add("warning", message="it waits", stalled=True)
    run.add("evaluation", step=3, reward=0.5, prompts=2)
    run.add("state", state="succeeded", message="all steps")
    tracker = Recording()
    follower(run, tracker, tmp_path).run()
    assert [step for step, _ in tracker.got] == [0, 1, 2, 3]
    assert tracker.got[2][1] == {"train/reward": 0.25, "train/reward/exact_match": 0.5}
    assert tracker.got[3][1] == {"eval/reward": 0.5, "eval/prompts": 2.0}
    assert tracker.alerts == ["warning: look \\x1b[31m at this", "rule: low", "stalled: it waits"]
    assert [row["completion"] for row in tracker.samples] == ["2", "three"]
    assert tracker.samples[0]["prompt"] == "<script>alert(1)</script>\\x1b[31m"
    assert tracker.states == ["succeeded all steps"]
    assert tracker.runs[0].config["name"] == "sums"
    assert is_done(tmp_path, "wandb")


def test_a_second_start_sends_what_is_new(run: RecordedRun, tmp_path: Path) -> None:
    run.add_steps(2)
    tracker = Recording()
    follower(run, tracker, tmp_path, only_now=True).run()
    run.add_steps(1)
    run.add("state", state="failed")
    follower(run, tracker, tmp_path).run()
    assert [step for step, _ in tracker.got] == [0, 1, 2]
    assert tracker.states == ["failed"]
    assert tracker.runs[0].identity == tracker.runs[1].identity


def test_a_tracker_that_is_away_gets_all_later(run: RecordedRun, tmp_path: Path) -> None:
    run.add_steps(4)
    run.add("state", state="succeeded")
    tracker = Recording()
    tracker.fail_before = {1, 3}
    follower(run, tracker, tmp_path).run()
    assert [step for step, _ in tracker.got] == [0, 1, 2, 3]


@pytest.mark.parametrize("knows", [True, False])
def test_a_lost_answer_is_repeated_unless_the_tracker_has_it(run: RecordedRun, tmp_path: Path, knows: bool) -> None:
    run.add_steps(3)
    run.add("state", state="succeeded")
    tracker = Recording()
    tracker.known, tracker.fail_after = (0 if knows else None), {1}
    follower(run, tracker, tmp_path).run()
    assert [step for step, _ in tracker.got] == ([0, 1, 2] if knows else [0, 1, 1, 2])


def test_a_tracker_that_lost_entries_gets_them_again_without_the_warnings(run: RecordedRun, tmp_path: Path) -> None:
    run.add_steps(1)
    run.add("warning", message="one")
    run.add_steps(1)
    tracker = Recording()
    tracker.known = 0
    follower(run, tracker, tmp_path, only_now=True).run()
    tracker.known, tracker.got = 0, []
    follower(run, tracker, tmp_path, only_now=True).run()
    assert [step for step, _ in tracker.got] == [0, 1]
    assert tracker.alerts == ["warning: one"]


def test_what_a_tracker_refuses_is_left_out_and_counted(run: RecordedRun, tmp_path: Path) -> None:
    run.add_steps(3)
    run.add("state", state="succeeded")
    tracker = Recording()
    tracker.refused = {1}
    follower(run, tracker, tmp_path).run()
    assert [step for step, _ in tracker.got] == [0, 2]
    assert json.loads((tmp_path / "wandb.json").read_text())["refused"] == 1


def test_it_follows_a_run_that_goes_on(run: RecordedRun, tmp_path: Path) -> None:
    run.add_steps(1)
    tracker = Recording()
    sending = threading.Thread(target=follower(run, tracker, tmp_path).run)
    sending.start()
    assert tracker.reached.wait(30)
    run.add_steps(1)
    run.add("state", state="cancelled")
    sending.join(30)
    assert not sending.is_alive()
    assert [step for step, _ in tracker.got] == [0, 1]
    assert tracker.states == ["cancelled"]


def test_a_resumed_run_goes_on_in_the_same_place(run: RecordedRun, tmp_path: Path) -> None:
    run.add_steps(1)
    run.add("state", state="failed")
    tracker = Recording()
    follower(run, tracker, tmp_path).run()
    run.add("state", state="running")
    run.add_steps(1)
    follower(run, tracker, tmp_path, only_now=True).run()
    assert not is_done(tmp_path, "wandb")
    run.add("state", state="succeeded")
    follower(run, tracker, tmp_path).run()
    assert [step for step, _ in tracker.got] == [0, 1]
    assert tracker.states == ["failed", "running", "succeeded"]


def test_one_process_at_a_time_and_a_damaged_cursor_is_named(run: RecordedRun, tmp_path: Path) -> None:
    cursor = Cursor(tmp_path, "wandb")
    with pytest.raises(Conflict, match="another process sends this run"):
        follower(run, Recording(), tmp_path).run()
    cursor.close()
    (tmp_path / "wandb.json").write_text('{"sequence": ')
    with pytest.raises(Unreadable, match="is damaged; remove it"):
        follower(run, Recording(), tmp_path).run()


def test_an_unknown_run_is_named(run: RecordedRun, tmp_path: Path) -> None:
    target = Target("nosuch", "wandb", SETTING, tmp_path, {})
    with pytest.raises(NotFound, match="nosuch"):
        Follower(target, run.records(), Recording().open).run()


def test_with_a_storage_key_no_text_is_sent(
    given_key: StorageKey, run: RecordedRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.add_steps(2)
    run.add("state", state="succeeded")
    tracker = Recording()
    with caplog.at_level("INFO"):
        follower(run, tracker, tmp_path).run()
    assert [step for step, _ in tracker.got] == [0, 1]
    assert tracker.samples == []
    config = tracker.runs[0].config
    assert "name" not in config
    assert isinstance(config["grpo"], dict)
    assert config["grpo"]["max_num_steps"]
    assert "wandb gets no samples and no texts of the spec, because a storage key is set" in caplog.text
