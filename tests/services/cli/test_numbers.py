"""Numbers on command lines: none is NaN, infinite or beyond its type, in any command."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from paceline.services.cli.main import main

INTEGERS = (click.types.IntParamType, click.IntRange)
FLOATS = (click.types.FloatParamType, click.FloatRange)


def number_options(group: click.Group, *path: str) -> Iterator[tuple[tuple[str, ...], click.Option]]:
    """Yield each option with one number, and the path of its command."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from number_options(command, *path, name)
        for option in command.params:
            if isinstance(option, click.Option) and isinstance(option.type, (*INTEGERS, *FLOATS)):
                yield (*path, name), option


def refused(*arguments: Any) -> str:
    done = CliRunner().invoke(main, [str(each) for each in arguments])
    assert done.exit_code == 2, (arguments, done.output, done.exception)
    return done.output


def test_no_command_takes_a_number_that_is_none() -> None:
    assert isinstance(main, click.Group)
    options = list(number_options(main))
    assert len(options) > 50
    for path, option in options:
        numbers = ["9" * 30, "-" + "9" * 30] + (["nan", "inf", "-inf"] if isinstance(option.type, FLOATS) else [])
        for number in numbers:
            text = refused(*path, f"{option.opts[0]}={number}")
            assert any(why in text for why in ("not a finite number", "beyond 64 bits", "not in the range")) or (
                isinstance(option.type, FLOATS) and "9" in number
            ), text


@pytest.mark.parametrize("role", ["coordinator", "rollout", "reward", "environment", "learner", "dashboard", "model"])
def test_no_port_is_beyond_65535(role: str) -> None:
    assert "not in the range" in refused("serve", role, "--port=65536")
    assert "not in the range" in refused("serve", role, "--port=-1")


@pytest.mark.parametrize("kind", ["folder", "missing", "loop"])
def test_a_file_that_cannot_be_read_is_a_sentence(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads it, and although no command expects the error."""
    path = tmp_path / "file"
    if kind == "folder":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)

    @click.command()
    def read() -> None:
        path.read_bytes()

    monkeypatch.setattr(main, "get_command", lambda context, name: read)
    done = CliRunner().invoke(main, ["doctor"])
    assert (done.exit_code, type(done.exception)) == (1, SystemExit)
    assert done.output.startswith(f"Error: {path}: ")
