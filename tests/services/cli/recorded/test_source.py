"""Commands on records: those that ask a coordinator say what those say that read its files."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pyarrow.parquet
import pytest
from click.testing import Result
from command_line import paceline
from trained_ledger import RUN_ID, Writer

from paceline.client import Client
from paceline.files.names import LEDGER_NAME
from paceline.services.cli.main import main
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202egnp.exe"


class Asked:
    """A coordinator of a ledger with one trained step, and the folder of its ledger."""

    def __init__(self, directory: Path, address: str):
        self.directory, self.address = directory, address

    def remote(self, *arguments: str | Path) -> Result:
        """Run a command that has the address alone."""
        return paceline(*arguments, "--coordinator", self.address)

    def here(self, *arguments: str | Path) -> Result:
        """Run a command that reads the files."""
        return paceline(*arguments, "--directory", self.directory)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    directory = tmp_path_factory.mktemp("asked")
    writer = Writer(directory, str(directory / "model"), {"prompt": HOSTILE, "answer": "2"})
    writer.train_a_step()
    with writer.ledger.transaction():
        writer.ledger.add_event(RUN_ID, "step", {"step": 0, "reward": 0.625, "loss": 0.5})
    writer.ledger.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PACELINE_TOKEN_FILE", raising=False)
        cluster = LocalCluster(directory / "runs", ClusterSection(), say=lambda line: None)
        try:
            patch.setenv("PACELINE_TOKEN_FILE", str(directory / "runs" / "token"))
            yield Asked(directory / "runs", cluster.start_coordinator())
        finally:
            cluster.stop()


@pytest.fixture(params=["remote", "here"])
def ask(asked: Asked, request: pytest.FixtureRequest) -> Callable[..., Result]:
    """Run a command, each way."""
    found: Callable[..., Result] = getattr(asked, request.param)
    return found


@pytest.mark.parametrize(
    "command",
    [
        ("samples", RUN_ID, "--json"),
        ("samples", RUN_ID, "--step", "0", "--worst", "1"),
        ("samples", RUN_ID, "--text", "three", "--json"),
        ("samples", RUN_ID, "--min-tokens", "3", "--json"),
        ("metrics", RUN_ID),
        ("metrics", RUN_ID, "--csv"),
        ("metrics", RUN_ID, "--json"),
    ],
)
def test_a_coordinator_says_what_the_files_say(asked: Asked, command: tuple[str, ...]) -> None:
    remote, here = asked.remote(*command), asked.here(*command)
    assert remote.exit_code == 0, remote.output
    assert remote.stdout
    assert remote.stdout == here.stdout


@pytest.mark.parametrize(
    "command",
    [
        ("samples", "nosuch"),
        ("samples", RUN_ID, "--step", "7"),
        ("samples", RUN_ID, "--eval"),
        ("samples", RUN_ID, "--eval", "--version", "3"),
        ("samples", RUN_ID, "--text", "nowhere"),
        ("samples", "export", "nosuch", "out.jsonl"),
        ("samples", "export", RUN_ID, "out.jsonl", "--pairs", "--best", "9"),
        ("metrics", "nosuch"),
        ("metrics", RUN_ID, "rewrd"),
        ("report", "nosuch"),
        ("plot", "nosuch"),
        ("export", RUN_ID),
        ("export", "nosuch"),
        ("ledger", "verify", "nosuch"),
    ],
)
def test_a_coordinator_refuses_what_the_files_refuse(asked: Asked, command: tuple[str, ...]) -> None:
    remote, here = asked.remote(*command), asked.here(*command)
    assert remote.exit_code == here.exit_code == 1
    assert remote.stderr.startswith("Error: ")
    assert remote.stderr == here.stderr


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("samples", "out.jsonl"),
        ("samples", "out.csv"),
        ("samples", "out.parquet"),
        ("traces", "out.jsonl"),
        ("traces", "out.parquet"),
    ],
)
def test_exports_are_the_same(asked: Asked, tmp_path: Path, kind: str, name: str) -> None:
    for run, folder in ((asked.remote, "remote"), (asked.here, "here")):
        (tmp_path / folder).mkdir()
        result = run(kind, "export", RUN_ID, tmp_path / folder / name)
        assert result.exit_code == 0, result.output
    assert (tmp_path / "remote" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()


def test_verify_runs_at_the_coordinator(asked: Asked, ask: Callable[..., Result]) -> None:
    result = ask("ledger", "verify")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("sums-1: all records agree\n")
    refused = asked.remote("ledger", "verify", "--repair")
    assert refused.exit_code == 2
    assert "run it on the coordinator's host" in refused.stderr


def test_tables_go_to_parquet(ask: Callable[..., Result], tmp_path: Path) -> None:
    metrics, samples = tmp_path / "metrics.parquet", tmp_path / "samples.parquet"
    assert ask("metrics", RUN_ID, "--parquet", metrics).exit_code == 0
    assert pyarrow.parquet.read_table(metrics).to_pydict() == {"step": [0], "reward": [0.625], "loss": [0.5]}
    result = ask("samples", RUN_ID, "--parquet", samples)
    assert result.exit_code == 0, result.output
    table = pyarrow.parquet.read_table(samples).to_pydict()
    assert table["completion"] == ["2", "three"]
    assert table["reward/exact_match"] == [1.0, 0.0]
    assert next(csv.DictReader(ask("metrics", RUN_ID, "--csv").stdout.splitlines()))["loss"] == "0.5"


def test_hostile_text_is_written_out(ask: Callable[..., Result]) -> None:
    text = ask("samples", RUN_ID).stdout
    assert "<script>alert(1)</script>\\x1b[31m\\u202egnp.exe" in text
    assert "\x1b" not in text
    (group,) = (json.loads(line) for line in ask("samples", RUN_ID, "--json").stdout.splitlines())
    assert group["prompt"] == HOSTILE


def test_unknown_runs_and_steps_are_named(ask: Callable[..., Result]) -> None:
    assert "no run 'nosuch'; the newest are: sums-1" in ask("samples", "nosuch").stderr
    assert "no run 'nosuch'" in ask("metrics", "nosuch").stderr
    assert "no sample that passes" in ask("samples", RUN_ID, "--text", "nowhere").stderr
    assert "has no complete checkpoint yet" in ask("export", RUN_ID).stderr


def test_columns_are_read_by_data_frames(asked: Asked) -> None:
    import pandas

    with Client(asked.address) as client:
        metrics = pandas.DataFrame(client.metrics(RUN_ID))
        samples = pandas.DataFrame(client.samples(RUN_ID))
        assert [event.kind for event in client.events(RUN_ID, quiet_s=0.01)][-1:] == ["step"]
        assert client.events(RUN_ID, kind="evaluation", quiet_s=0.01) == []
    assert metrics["reward"].tolist() == [0.625]
    assert samples["num_tokens"].tolist() == [2, 3]
    assert samples.groupby("group_id")["final_reward"].mean().tolist() == [0.625]


def test_the_coordinator_of_the_environment_is_asked_if_nobody_names_a_folder(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / LEDGER_NAME).write_bytes(b"of other runs")
    result = paceline("metrics", RUN_ID, coordinator=asked.address)
    assert result.exit_code == 0, result.output
    assert "reward" in result.stdout
    assert f"the command reads from the coordinator at {asked.address} (PACELINE_COORDINATOR)" in result.stderr
    named = paceline("metrics", RUN_ID, "--directory", "elsewhere", coordinator=asked.address)
    assert "no ledger at elsewhere" in named.stderr


NO_READERS = {
    *("doctor", "demo", "up", "serve coordinator"),  # they start services in the folder, or check it
    *("grpo", "sft", "dpo", "kto", "orpo", "rm", "distillation", "offline_grpo", "sweep"),  # without --coordinator too
    "serve host-agent",  # started by a worker
}
READERS_OF_NAMED_RUNS = {"chat", "eval", "serve model", "replay"}
"""Commands that read the folder only for a run that is named by its id; then they say so."""


def commands(group: click.Group, context: click.Context, path: str = "") -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        yield f"{path}{name}", command
        if isinstance(command, click.Group):
            yield from commands(command, context, f"{path}{name} ")


def test_every_command_on_records_obeys_the_variable_or_says_that_it_reads_files() -> None:
    undecided = []
    for name, command in commands(main, click.Context(main)):
        options = {option.name: option for option in command.params if isinstance(option, click.Option)}
        obeys = "PACELINE_COORDINATOR" in {
            text for option in options.values() for text in (option.envvar, *re.findall(r"\w+", option.help or ""))
        }
        if {"directory", "coordinator"} & options.keys() and not obeys:
            undecided.append(name)
    assert set(undecided) == NO_READERS | READERS_OF_NAMED_RUNS


@pytest.mark.parametrize(
    "command",
    [
        *(
            ("audit", "show"),
            ("audit", "verify"),
            ("ledger", "backup", "copy"),
            ("token", "list"),
            ("replay", "sums-1"),
        ),
        *(("chat", "sums-1"), ("serve", "model", "sums-1"), ("generate", "3 + 4 =", "--export", "sums-1")),
    ],
)
def test_a_command_that_reads_files_says_so(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = "the command works with the files in runs, not with the coordinator at 127.0.0.1:1 (PACELINE_COORDINATOR)"
    assert said in paceline(*command).stderr
    assert said not in paceline(*command, "--directory", "runs").stderr
    assert said not in paceline(*command, coordinator="").stderr


def test_a_repair_needs_a_folder_if_a_coordinator_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = paceline("ledger", "verify", "--repair")
    assert result.exit_code == 2
    assert "name the --directory" in result.stderr


def test_the_dashboard_obeys_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = paceline("serve", "dashboard", "--port", "0", "--ready-file", "no/file")
    assert "reads from the coordinator at 127.0.0.1:1" in result.stderr
