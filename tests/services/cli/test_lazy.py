"""Commands of apps: found by entry points, added to the core's and never in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from paceline.services.cli import lazy
from paceline.services.cli.lazy import GROUP, LazyGroup

Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Install]:
    """Make these the installed apps: of each the text of its module."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def installed(**modules: str) -> None:
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        found = [EntryPoint(name, f"{name}:COMMANDS", GROUP) for name in modules]
        monkeypatch.setattr(lazy, "entry_points", lambda group: found if group == GROUP else [])
        lazy.sections_of_apps.cache_clear()

    yield installed
    lazy.sections_of_apps.cache_clear()


def command_line(name: str = "") -> click.Group:
    own = {"Begin": {"up": ("paceline.services.cli.running.up:up", "Start.")}}
    return LazyGroup(name or None, sections=own)


APP = """\
import click
COMMANDS = {{"{heading}": {{"{name}": ("{module}:greet", "Greet.")}}}}
@click.command()
def greet():
    click.echo("hello")
"""


def test_without_apps_the_core_has_its_commands(install: Install) -> None:
    install()
    assert list(command_line().entries) == ["up"]


def test_an_app_adds_a_command_under_a_heading_of_its_own(install: Install) -> None:
    install(greeting_app=APP.format(heading="Greetings", name="greet", module="greeting_app"))
    output = CliRunner().invoke(command_line(), ["--help"]).output
    assert output.index("Begin:") < output.index("Greetings:")
    assert CliRunner().invoke(command_line(), ["greet"]).output == "hello\n"


def test_an_app_takes_no_name_of_the_core(install: Install) -> None:
    install(taking_app=APP.format(heading="Begin", name="up", module="taking_app"))
    assert command_line().entries["up"][1] == "Start."


def test_an_app_that_fails_is_left_out_and_named(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(
        broken_app="raise OSError('no such disk')",
        sound_app=APP.format(heading="Begin", name="greet", module="sound_app"),
    )
    assert list(command_line().entries) == ["up", "greet"]
    assert capsys.readouterr().err == "the app broken_app (broken_app:COMMANDS) is left out: no such disk\n"


def test_a_role_of_serve_is_no_command_of_its_own(install: Install) -> None:
    install(serving_app=APP.format(heading=lazy.SERVE, name="greeter", module="serving_app"))
    assert list(command_line().entries) == ["up"]
    assert list(command_line("serve").entries) == ["up", "greeter"]


def test_a_table_that_only_takes_names_leaves_no_empty_heading(install: Install) -> None:
    install(empty_app=APP.format(heading="Greetings", name="up", module="empty_app"))
    done = CliRunner().invoke(command_line(), ["--help"])
    assert done.exit_code == 0
    assert "Greetings" not in done.output


def test_the_first_app_of_a_name_keeps_it(install: Install) -> None:
    install(
        a_app=APP.format(heading="Greetings", name="greet", module="a_app"),
        b_app=APP.format(heading="Greetings", name="greet", module="b_app"),
    )
    assert command_line().entries["greet"][0] == "a_app:greet"


def test_a_command_of_the_core_loads_no_app(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(ending_app="raise SystemExit('it ends the process')")
    assert command_line().get_command(click.Context(command_line()), "up") is not None
    assert capsys.readouterr().err == ""
    assert list(command_line().entries) == ["up"]
    assert "ending_app" in capsys.readouterr().err
