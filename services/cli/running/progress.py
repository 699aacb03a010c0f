"""Shows the progress of a run: one line for each event, and on a terminal a bar with the reward's curve. If the output
is not a terminal, each line begins with the time and the run, because it is read in the log of a container."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import click

from paceline.client import Event
from paceline.errors import counted
from paceline.services.cli import render
from paceline.services.common.options import json_option, print_json
from paceline.services.common.reporting.terminal import scaled, sparkline

ALWAYS = frozenset({"warning", "state"})
"""Kinds of events that --quiet shows too."""

BAR_CURVE_COLUMNS = 16
INTERVALS = 20
"""Number of newest steps from whose pace the remaining time is computed."""

Show = Callable[[Event], None]


class Shown(NamedTuple):
    as_json: bool = False
    quiet: bool = False
    """True to print only warnings, changes of state and the outcome."""
    bar: bool = True
    """True to show a progress bar, if the output is a terminal."""


def shown_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --json, --quiet and --no-progress to a command, and pass their values to it as its argument `shown`."""

    @functools.wraps(command)
    def with_shown(*args: Any, as_json: bool, quiet: bool, no_progress: bool, **options: Any) -> None:
        command(*args, shown=Shown(as_json, quiet, not no_progress), **options)

    for option in (
        click.option("--no-progress", is_flag=True, help="Print only lines, without a bar, also on a terminal."),
        click.option("--quiet", "-q", is_flag=True, help="Print only warnings, changes of state and the outcome."),
        json_option,
    ):
        with_shown = option(with_shown)
    return with_shown


class Course:
    """A run's progress, as computed from its events."""

    def __init__(self, total_steps: int, *, live_from: float = 0, clock: Callable[[], float] = time.monotonic):
        """Events count as live once `live_from` steps are trained; if `live_from` is infinite, no event is live."""
        self.total_steps = total_steps
        self._live_from = live_from
        self.step = 0
        self.values: list[float] = []
        """Reward of each step that had a reward; for a run on examples, the loss of each step."""
        self.measure = "reward"
        """Name of the values: `reward` or `loss`."""
        self.evaluations: list[dict[str, Any]] = []
        self._clock = clock
        self._times_s: deque[float] = deque(maxlen=INTERVALS + 1)

    @property
    def is_live(self) -> bool:
        """Return whether the newest event has happened just now."""
        return self.step >= self._live_from

    def note(self, event: Event) -> None:
        if event.kind == "evaluation":
            self.evaluations.append(event.content)
        if event.kind != "step":
            return
        self.step = int(event.content["step"]) + 1
        samples = "reward" in event.content or "completion_length" in event.content
        self.measure = "reward" if samples else "loss"
        value = event.content.get(self.measure)
        if value is not None:
            self.values.append(float(value))
        if self.step > self._live_from:
            self._times_s.append(self._clock())

    def left(self) -> str:
        """Return the remaining time as text; empty while it is unknown."""
        intervals, steps = len(self._times_s) - 1, self.total_steps - self.step
        if intervals < 1 or steps <= 0:
            return ""
        left_s = steps * (self._times_s[-1] - self._times_s[0]) / intervals
        return render.duration(left_s) if left_s >= 1 else ""

    def curve(self, columns: int) -> str:
        return sparkline(scaled(self.values), columns)


@contextlib.contextmanager
def screen(run_id: str, course: Course, shown: Shown, earlier: int = 0) -> Iterator[Show]:
    """Yield a function that shows an event. One line summarizes the earlier events, up to number `earlier`."""
    with contextlib.ExitStack() as stack:
        if shown.as_json:
            say = None
        elif sys.stdout.isatty() and shown.bar and not shown.quiet:
            say = stack.enter_context(_bar(run_id, course))
        else:
            say = _plain(run_id, course)
        summarized = False

        def show(event: Event) -> None:
            nonlocal summarized
            is_old = event.sequence <= earlier
            course.note(event)
            if say is None:
                content = {"kind": event.kind, "content": event.content}
                print_json({"run_id": run_id, "sequence": event.sequence} | content)
                return
            if is_old:
                return
            if not summarized and course.step and earlier:
                done = course.step - (event.kind == "step")
                say(None, f"{counted(done, 'step')} trained earlier  {course.curve(render.CURVE_COLUMNS)}")
            summarized = True
            if not shown.quiet or event.kind in ALWAYS:
                say(event, render.event_line(event.kind, event.content))

        yield show


def _plain(run_id: str, course: Course) -> Callable[[Event | None, str], None]:
    """Return a function that prints a line, and if the output is not a terminal, also the time, the run and the
    remaining time."""
    is_terminal = sys.stdout.isatty()

    def say(event: Event | None, line: str) -> None:
        left = course.left() if event is not None and event.kind == "step" else ""
        if is_terminal:
            click.echo(line)
        else:
            now = f"{time.strftime('%H:%M:%S')} " if course.is_live else ""
            click.echo(f"{now}{run_id}  {line}{f'  ETA {left}' if left else ''}")

    return say


@contextlib.contextmanager
def _bar(run_id: str, course: Course) -> Iterator[Callable[[Event | None, str], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=12),
        MofNCompleteColumn(),
        TextColumn("{task.fields[curve]}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(run_id, total=course.total_steps, curve="loading", left="")

        def say(event: Event | None, line: str) -> None:
            style = render.STYLES.get(event.kind, "") if event is not None else ""
            progress.console.print(Text(line, style=style))
            if event is None or event.kind == "step":
                left = course.left()
                progress.update(
                    task,
                    completed=course.step,
                    curve=course.curve(BAR_CURVE_COLUMNS),
                    left=f"{left} left" if left else "",
                )

        yield say
