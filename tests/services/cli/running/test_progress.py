"""Lines about a run: where they go, what is left out, and the time that is left."""

from __future__ import annotations

import json
import queue
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import click
import pytest

from paceline.client import Event
from paceline.services.cli.running.progress import Course, Shown, screen
from paceline.services.cli.running.watching import follow, in_front_of, queue_shown
from paceline.v1 import run_pb2

DEADLINE_S = 60.0


def step(number: int, reward: float | None = 0.5, sequence: int | None = None) -> Event:
    """A step's event; by default the sequence number is the step's plus 10."""
    content = {"step": number, "completion_length": 4.0} | ({} if reward is None else {"reward": reward})
    return Event(number + 10 if sequence is None else sequence, "step", content)


def state(sequence: int, name: str, message: str = "") -> Event:
    return Event(sequence, "state", {"state": name, "message": message})


class Source:
    """Runs and events, as a client has them."""

    def __init__(self, events: list[Event], *runs: run_pb2.Run):
        self._events, self._runs = events, {run.run_id: run for run in runs}
        self._asked: queue.Queue[None] = queue.Queue()

    def get(self, run_id: str) -> run_pb2.Run:
        """A run."""
        return self._runs[run_id]

    def replace(self, run: run_pb2.Run) -> None:
        """Give a run another state."""
        self._runs[run.run_id] = run

    def runs(self) -> list[run_pb2.Run]:
        """All runs, oldest first."""
        self._asked.put(None)
        return list(self._runs.values())

    def until_asked_again(self) -> None:
        """Wait until somebody has acted on the runs as they are now: two questions later."""
        while not self._asked.empty():
            self._asked.get()
        for _ in range(3):  # the first may have been asked before the change
            self._asked.get(timeout=DEADLINE_S)

    def watch(self, run_id: str, after: int = 0) -> Iterator[Event]:
        """Events after a number."""
        return (event for event in self._events if event.sequence > after)


def a_run(run_id: str, name: str, message: str = "", at: int = 3) -> run_pb2.Run:
    number = run_pb2.RunState.Value(f"RUN_STATE_{name.upper()}")
    return run_pb2.Run(run_id=run_id, state=number, message=message, step=at, max_num_steps=8)


def show_all(events: list[Event], shown: Shown = Shown(), earlier: int = 0) -> None:  # noqa: B008
    with screen("sums-1", Course(8), shown, earlier) as show:
        for event in events:
            show(event)


def test_lines_of_a_log_have_time_run_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock = SimpleNamespace(now_s=100.0)
    course = Course(8, clock=lambda: clock.now_s)
    with screen("sums-1", course, Shown()) as show:
        for number in range(3):
            show(step(number))
            clock.now_s += 10.0
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d sums-1  step    0  reward  0.500  len    4", lines[0])
    assert lines[2].endswith("  ETA 50 s")  # five steps of ten seconds


def test_a_quiet_screen_has_warnings_and_states(capsys: pytest.CaptureFixture[str]) -> None:
    warning = Event(2, "warning", {"message": "no signal"})
    show_all([state(1, "running"), warning, step(0)], Shown(quiet=True))
    lines = [line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == ["the run is running", "warning: no signal"]


def test_earlier_events_are_summed_up_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    show_all([step(number, number / 8) for number in range(4)], earlier=12)
    first, second = (line.split("  ", 1)[1] for line in capsys.readouterr().out.splitlines())
    assert first == "3 steps trained earlier   ▁▂▃"
    assert second.startswith("step    3")


def test_what_happened_before_has_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    with screen("sums-1", Course(8, live_from=1), Shown()) as show:
        show(Event(1, "session", {"session": 1}))
        show(step(0))
        show(step(1))
    old, older, new = capsys.readouterr().out.splitlines()
    assert old == "sums-1  learner session 1 begins and loads the model"
    assert re.match(r"\d\d:\d\d:\d\d sums-1  step    1", new)
    assert older


def test_json_has_every_event(capsys: pytest.CaptureFixture[str]) -> None:
    show_all([step(0), step(1)], Shown(as_json=True), earlier=10)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["sequence"] for line in lines] == [10, 11]


def test_the_curve_leaves_out_steps_without_a_reward() -> None:
    course = Course(8)
    for number, reward in enumerate((0.0, None, 1.0)):
        course.note(step(number, reward))
    assert (course.values, course.step, course.curve(8)) == ([0.0, 1.0], 3, " █")


def test_the_reason_of_a_failure_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    source: Any = Source([step(0), state(30, "failed", "no data")], a_run("sums-1", "failed", "no data"))
    with pytest.raises(click.exceptions.Exit):
        follow(source, "sums-1", shown=Shown())
    assert capsys.readouterr().out.count("no data") == 1
    with pytest.raises(click.exceptions.Exit):
        follow(source, "sums-1", shown=Shown(), after=30)  # its last state is not among these events
    assert capsys.readouterr().out.count("no data") == 1


def test_the_outcome_has_the_curve(capsys: pytest.CaptureFixture[str]) -> None:
    events = [step(0, 0.25), step(1, 0.75), state(30, "succeeded")]
    source: Any = Source(events, a_run("sums-1", "succeeded"))
    follow(source, "sums-1", shown=Shown())
    assert "reward of the steps: ▂▆  0.250 to 0.750" in capsys.readouterr().out


def test_a_queued_run_names_the_one_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    runs = (a_run("old-1", "succeeded"), a_run("sums-1", "running"), a_run("sums-2", "queued", at=0))
    source: Any = Source([state(1, "queued"), state(2, "succeeded")], *runs)
    advice = "sums-2 waits for sums-1 (running, step 3 of 8); `paceline cancel sums-1` ends that run"
    assert in_front_of(source, "sums-1") is None
    with pytest.raises(click.exceptions.Exit):
        follow(source, "sums-2", shown=Shown())
    assert capsys.readouterr().err.splitlines() == [advice]


def test_a_pause_of_the_run_in_front_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    source: Any = Source([], a_run("sums-1", "running"), a_run("sums-2", "queued", at=0))
    with queue_shown(source, "sums-2", every_s=0.01):
        for name, message in (("paused", "no file 'r.py'"), ("paused", "no file 'r.py'"), ("running", "")):
            source.replace(a_run("sums-1", name, message))
            source.until_asked_again()
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" (")[2].partition(")")[0] for line in lines] == [
        "running, step 3 of 8",
        "paused, step 3 of 8: no file 'r.py'",
        "running, step 3 of 8",
    ]


def test_the_outcome_of_a_run_on_examples_has_the_losses(capsys: pytest.CaptureFixture[str]) -> None:
    events = [Event(number + 10, "step", {"step": number, "loss": 2.0 - number}) for number in range(2)]
    source: Any = Source([*events, state(30, "succeeded")], a_run("sums-1", "succeeded"))
    follow(source, "sums-1", shown=Shown())
    assert "loss of the steps: █   2.000 to 1.000" in capsys.readouterr().out


def test_the_outcome_counts_only_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    source: Any = Source([state(30, "succeeded")], a_run("sums-1", "succeeded"))
    follow(source, "sums-1", shown=Shown())
    out = capsys.readouterr().out
    assert "tokens:" not in out  # as of a run on examples, whose books have none
    assert "groups dropped" not in out
    run = a_run("sums-2", "succeeded")
    run.tokens.update({"trained": 1200, "dropped": 30})
    run.groups.update({"dropped:bad_prompt": 3, "dropped:run_ended": 5, "dropped:stale": 0, "trained": 7})
    sampled: Any = Source([state(30, "succeeded")], run)
    follow(sampled, "sums-2", shown=Shown())
    out = capsys.readouterr().out
    assert "tokens: 1,200 trained, 30 dropped, 0 wasted" in out
    assert "groups dropped: 3 bad_prompt\n" in out
