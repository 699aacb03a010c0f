"""Operators can require isolation, turn it off and pass variables; a service that cannot isolate as required does not
start."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from exchange_drivers import make_spec

from paceline.services.cli.main import main
from paceline.services.common import user_code_options
from paceline.services.common.worker.assigned_run import refusal_of_files
from paceline.user_code import surroundings
from paceline.user_code import surroundings as variables


@pytest.fixture(autouse=True)
def without_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables, also after the test: the options set them for child processes."""
    monkeypatch.setenv(surroundings.VARIABLE, "")
    monkeypatch.setenv(variables.PASSED_VARIABLE, "")
    monkeypatch.setattr(user_code_options, "why_no_isolation", lambda: "")


@click.command()
@user_code_options.user_code_options
def service() -> None:
    chosen = os.environ[surroundings.VARIABLE]
    click.echo(f"{chosen or 'open'} {surroundings.isolation().name} {os.environ[variables.PASSED_VARIABLE]}")


@pytest.mark.parametrize(
    ("arguments", "environment", "printed"),
    [
        ((), {}, "open OPEN "),
        (("--require-isolation",), {}, "1 REQUIRED "),
        ((), {surroundings.VARIABLE: "1"}, "1 REQUIRED "),
        (("--no-isolation",), {surroundings.VARIABLE: "1"}, "0 OPEN "),
        ((), {surroundings.VARIABLE: "0"}, "0 OPEN "),
        (("--pass-env", "A", "--pass-env", "B_2"), {variables.PASSED_VARIABLE: "C"}, "open OPEN C,A,B_2"),
    ],
)
def test_options_hold_for_child_processes(
    arguments: tuple[str, ...], environment: dict[str, str], printed: str
) -> None:
    assert CliRunner().invoke(service, arguments, env=environment).output == f"{printed}\n"


def test_what_is_no_name_of_a_variable_is_refused() -> None:
    done = CliRunner().invoke(service, ["--pass-env", "A=secret"])
    assert (done.exit_code, "'A=secret' is not the name of a variable" in done.output) == (2, True)


@pytest.mark.parametrize("command", [("serve", "reward"), ("serve", "environment"), ("up",)])
@pytest.mark.parametrize("option", [("--require-isolation",), ()])
def test_a_service_that_cannot_isolate_does_not_start(
    command: tuple[str, ...], option: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(user_code_options, "why_no_isolation", lambda: "this kernel has no Landlock")
    if not option:
        monkeypatch.setenv(surroundings.VARIABLE, "1")
    done = CliRunner().invoke(main, [*command, *option])
    assert done.exit_code == 2
    assert "--require-isolation is impossible on this host: this kernel has no Landlock" in done.output


def test_isolated_workers_take_code_of_bundles_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_spec(tmp_path, rewards=[{"function": f"{tmp_path}/f.py:f"}], folder=str(tmp_path))
    assert refusal_of_files(own, "", ()) == ""
    monkeypatch.setenv(surroundings.VARIABLE, "1")
    assert "f.py:f is in no bundle, and --require-isolation accepts only code in bundles" in refusal_of_files(
        own, "", ()
    )
    assert refusal_of_files(own, "digest", ()) == ""
    assert refusal_of_files(make_spec(tmp_path, rewards=[{"function": "math_accuracy"}]), "", ()) == ""
