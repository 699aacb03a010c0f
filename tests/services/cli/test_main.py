"""The command line: instant help, one-line errors, and the run commands against a real coordinator process."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from command_line import paceline

from paceline.client import Client
from paceline.errors import PacelineError
from paceline.services.cli import render
from paceline.services.cli.doctor import Finding, examine, examine_sandbox
from paceline.services.cli.main import main, serve
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection
from paceline.v1.run_pb2 import RUN_STATE_PAUSED, Run

IMPORTS = (
    "import sys, click.testing, paceline.services.cli.main\n"
    "result = click.testing.CliRunner().invoke(paceline.services.cli.main.main, sys.argv[1:])\n"
    "assert result.exit_code == 0, result.output\n"
    "heavy = {'torch', 'grpc', 'transformers', 'numpy', 'pydantic', 'rich', 'datasets'} & sys.modules.keys()\n"
    "print(sorted(heavy))"
)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    """A coordinator without workers."""
    cluster = LocalCluster(tmp_path / "runs", ClusterSection(), say=lambda line: None)
    try:
        cluster.start_coordinator()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A coordinator without workers, for tests that know the ids of their runs."""
    cluster = LocalCluster(tmp_path_factory.mktemp("shared"), ClusterSection(), say=lambda line: None)
    try:
        cluster.start_coordinator()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    path = tmp_path / "spec.yaml"
    path.write_text(
        "{name: sums, policy: {model_name: none}, data: {train: train.jsonl}, rewards: [{function: exact_match}]}"
    )
    return path


def lines_of_events(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def lines_of(result: Result) -> list[dict[str, Any]]:
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["serve", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_commands_that_need_no_coordinator_import_no_grpc() -> None:
    code = "import sys, paceline.services.cli.running.runs, paceline.services.cli.running.up, paceline.services.cli.recorded.records, paceline.client; " \
        "print(sorted({'torch', 'grpc', 'rich'} & sys.modules.keys()))"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"


def test_help_lists_every_command() -> None:
    output = paceline("--help").output
    for name in main.entries:
        assert f"\n  {name} " in output


@pytest.mark.parametrize("name", sorted(main.entries.keys() - {"demo", "serve"}))
def test_every_command_can_be_imported_and_says_what_it_does(name: str) -> None:
    result = paceline(name, "--help")
    assert result.exit_code == 0, result.output
    assert f"Usage: main {name}" in result.output


@pytest.mark.parametrize("role", sorted(serve.entries))
def test_serve_hands_over_to_the_service(role: str) -> None:
    result = paceline("serve", role, "--help")
    assert result.exit_code == 0, result.output
    assert "--port" in result.output


def test_no_coordinator_is_one_line_with_the_remedy() -> None:
    result = paceline("runs")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: no coordinator answers at 127.0.0.1:1; start one with `paceline serve coordinator` or name another "
        "with --coordinator\n"
    )
    assert result.stdout == ""


def test_a_misspelt_spec_is_one_line(spec_path: Path) -> None:
    result = paceline("submit", str(spec_path), "grpo.max_step=3")
    assert result.exit_code == 1
    assert result.stderr == "Error: grpo.max_step: unknown key; did you mean 'max_num_steps'?\n"


def test_a_missing_spec_is_one_line(tmp_path: Path) -> None:
    result = paceline("up", str(tmp_path / "no.yaml"), "--directory", str(tmp_path / "runs"))
    assert result.exit_code == 1
    assert result.stderr.startswith("Error: cannot read the spec")
    assert not (tmp_path / "runs").exists()


def test_up_without_spec_needs_an_open_run(tmp_path: Path) -> None:
    result = paceline("up", "--directory", str(tmp_path / "runs"))
    assert result.exit_code == 2
    assert "has no open run" in result.stderr


def test_up_tells_its_coordinator_how_much_of_the_disk_stays_free(
    spec_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def start(*_: Any, options: dict[str, list[str]], **__: Any) -> LocalCluster:
        asked.extend(options["coordinator"])
        raise PacelineError("nothing is started here")

    monkeypatch.setattr("paceline.services.cli.running.up.LocalCluster", start)
    result = paceline("up", str(spec_path), "--directory", str(tmp_path / "runs"), "--min-free-mb", "7")
    assert result.stderr.splitlines()[-1] == "Error: nothing is started here"
    assert asked[:2] == ["--min-free-mb", "7"]


def test_runs_are_submitted_listed_held_and_ended(cluster: LocalCluster, spec_path: Path) -> None:
    at = cluster.address
    assert paceline("runs", coordinator=at).stdout == "no runs yet\n"
    submitted = lines_of(paceline("submit", str(spec_path), "--json", coordinator=at))
    assert [(run["run_id"], run["step"], run["max_num_steps"]) for run in submitted] == [("sums-1", 0, 100)]
    again = paceline("submit", str(spec_path), "name=again", coordinator=at)
    assert again.stdout == f"run again-2 is queued: {cluster.directory / 'again-2'}\n"
    listed = lines_of(paceline("runs", "--json", coordinator=at))
    assert [run["run_id"] for run in listed] == ["sums-1", "again-2"]
    table = paceline("runs", coordinator=at).stdout.splitlines()
    assert table[0].split()[:3] == ["run", "state", "steps"]
    assert table[2].startswith("again-2  queued (#")
    assert "0/100" in table[2]
    refused = paceline("resume", "again-2", coordinator=at)
    assert (refused.exit_code, refused.stderr) == (
        1,
        "Error: run again-2 is queued; only a paused or failed run can be resumed\n",
    )
    refused = paceline("drop", "again-2", "3", coordinator=at)
    assert refused.stderr.startswith("Error: run again-2 is queued; groups are dropped only while it is paused")
    assert paceline("cancel", "again-2", coordinator=at).stdout == "run again-2 is cancelled\n"
    assert lines_of(paceline("cancel", "sums-1", "--json", coordinator=at))[0]["state"] == "cancelled"


class Dropping:
    """Stand-in for the client: it drops groups as a coordinator would."""

    def __init__(self, coordinator: str) -> None:
        pass

    def __enter__(self) -> Dropping:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def drop_groups(self, run_id: str, group_ids: Sequence[int]) -> Run:
        assert (run_id, list(group_ids)) == ("sums-1", [3, 15][: len(group_ids)])
        return Run(run_id=run_id, state=RUN_STATE_PAUSED, step=4, max_num_steps=9)


def test_what_drop_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.services.cli.running.runs.Client", Dropping)
    assert paceline("drop", "sums-1", "3", "15").stdout == (
        "dropped groups 3, 15 of run sums-1, which is paused; `paceline resume sums-1` continues the run\n"
    )
    assert paceline("drop", "sums-1", "3").stdout.startswith("dropped group 3 of run sums-1, ")
    (facts,) = lines_of(paceline("drop", "sums-1", "3", "--json"))
    assert (facts["run_id"], facts["state"], facts["step"]) == ("sums-1", "paused", 4)
    assert paceline("drop", "sums-1", "-1").exit_code == 2
    assert "Missing argument 'GROUP...'" in paceline("drop", "sums-1").stderr


def test_what_is_doubtful_is_said_at_submit_and_stays_among_the_events(
    shared_cluster: LocalCluster, spec_path: Path
) -> None:
    at, setting = shared_cluster.address, "loss_fn.truncated_importance_sampling_ratio=null"
    said = paceline("submit", str(spec_path), setting, coordinator=at)
    assert said.exit_code == 0
    assert said.stderr.startswith("warning: async_grpo.max_trajectory_age_steps 1 with loss_fn.truncated")
    run_id = said.stdout.split()[1]
    paceline("cancel", run_id, coordinator=at)
    events = lines_of_events(paceline("watch", run_id, "--json", coordinator=at))
    assert [f"warning: {e['content']['message']}\n" for e in events if e["kind"] == "warning"] == [said.stderr]
    as_json = lines_of(paceline("submit", str(spec_path), setting, "--json", coordinator=at))
    assert [f"warning: {text}\n" for text in as_json[0]["warnings"]] == [said.stderr]
    assert paceline("submit", str(spec_path), coordinator=at).stderr == ""


def test_watch_shows_how_a_run_ended(shared_cluster: LocalCluster, spec_path: Path) -> None:
    at = shared_cluster.address
    run_id = paceline("submit", str(spec_path), coordinator=at).stdout.split()[1]
    paceline("cancel", run_id, coordinator=at)
    text = paceline("watch", run_id, coordinator=at)
    assert text.exit_code == 1, "the run did not succeed"
    lines = text.stdout.splitlines()
    assert lines[0] == f"{run_id}  the run is queued: data.train: prompts, in the format TRL's prompt-only, standard"
    assert f"{run_id}  the run was cancelled: cancelled by request" in lines
    assert f"{run_id} cancelled after 0 of 100 steps" in lines[-2:]
    as_json = paceline("watch", run_id, "--json", coordinator=at)
    events = [json.loads(line) for line in as_json.stdout.splitlines()]
    first = events[0]
    assert (first["run_id"], first["sequence"], first["kind"]) == (run_id, 1, "state")
    assert first["content"]["state"] == "queued"
    assert [event["sequence"] for event in events] == list(range(1, len(events) + 1))
    later = paceline("watch", run_id, "--json", "--after", "1", coordinator=at)
    assert [json.loads(line) for line in later.stdout.splitlines()] == events[1:]


def test_workers_that_are_not_there(shared_cluster: LocalCluster) -> None:
    assert paceline("members", coordinator=shared_cluster.address).stdout == "no workers yet\n"
    assert lines_of(paceline("members", "--json", coordinator=shared_cluster.address)) == []
    result = paceline("generate", "1+1=", coordinator=shared_cluster.address)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: no rollout worker with an address belongs to {shared_cluster.address}")
    result = paceline("generate", "1+1=", "--temperature", "0", coordinator=shared_cluster.address)
    assert result.stderr == "Error: n is 1 and temperature 0.0; both must be above 0\n"


def test_doctor_reports_what_it_really_found(tmp_path: Path) -> None:
    findings = {finding.name: finding for finding in examine(tmp_path / "runs")}
    assert findings["Python"].value.startswith(sys.version.split()[0])
    assert findings["torch"].status == "ok"
    assert findings["directory"].value.startswith(f"{tmp_path / 'runs'} is writable")
    assert not (tmp_path / "runs").exists()
    printed = lines_of(paceline("doctor", "--json", "--directory", str(tmp_path)))
    assert [line["name"] for line in printed] == [
        *findings,
        *(each.name for each in examine_sandbox()),
        "user code",
    ]


def test_doctor_fails_where_nothing_can_be_written() -> None:
    findings = {finding.name: finding for finding in examine(Path("/proc/paceline"))}
    assert findings["directory"] == Finding(
        "directory",
        "fault",
        "cannot write in /proc: No such file or directory",
        "name another folder with --directory",
    )


def test_a_step_fits_a_line_of_80_columns() -> None:
    metrics = {
        "step": 11,
        "reward": 0.5123,
        "completion_length": 1414.25,
        "rollout/tokens_per_s": 123456.7,
        "step_s": 0.314,
        "learner_wait_s": 12.03,
        "age/0": 3.0,
        "age/2": 1.0,
        "age/3": 0.0,
    }
    line = render.event_line("step", metrics)
    assert line == (
        "step   11  reward  0.512  len 1414  123457 tok/s  train 0.3s  wait 12.0s"  # age 0.5 would pass column 80
    )
    assert render.event_line("step", metrics | {"rollout/tokens_per_s": 0.0}).endswith("wait 12.0s  age 0.5")
    usual = metrics | {"rollout/tokens_per_s": 12345.6, "learner_wait_s": 2.0}
    assert render.event_line("step", usual).endswith("  12346 tok/s  train 0.3s  wait 2.0s  age 0.5")
    long = metrics | {"step": 123456, "reward": -1234.5, "step_s": 1234.5, "learner_wait_s": 1234.5}
    assert len(render.event_line("step", long)) <= 80


@pytest.mark.parametrize(
    ("kind", "content", "line"),
    [
        ("step", {"step": 3, "loss": 1.25}, "step    3  loss  1.2500"),
        (
            "step",
            {"step": 3, "reward": float("nan"), "rollout/tokens_per_s": 0.0},
            "step    3  reward      -",
        ),
        ("step", {"step": 3, "loss": 0.5, "completion_length": 8.0}, "step    3  reward      -  len    8"),
        (
            "evaluation",
            {"step": 12, "reward": 0.75, "samples": 256, "failed": 2, "completion_length": 5.0},
            "evaluation of version 12 (after step 11): reward 0.750, 256 prompts, 2 failed, length 5.0",
        ),
        (
            "evaluation",
            {
                "step": 12,
                "reward": 0.75,
                "reward_stderr": 0.05,
                "reward/math": 0.5,
                "reward_stderr/math": 0.1,
                "reward/format": 1.0,
                "pass@4/math": 0.625,
                "prompts": 64,
                "samples": 256,
                "completion_length": 5.0,
            },
            "evaluation of version 12 (after step 11): reward 0.750 ± 0.050, math 0.500 ± 0.100, format 1.000, "
            "pass@4/math 0.625, 64 prompts, length 5.0",
        ),
        (
            "evaluation",
            {"step": 0, "reward": None},
            "evaluation of version 0 (before training): reward -, 0 prompts, length -",
        ),
        ("state", {"state": "failed", "message": "no data"}, "the run has failed: no data"),
        ("checkpoint", {"step": 50, "path": "/c", "seconds": 1.25}, "checkpoint after step 49 in 1.2 s: /c"),
        (
            "checkpoint",
            {"step": 0, "path": "/c", "seconds": 1.25},
            "checkpoint before the first step in 1.2 s: /c",
        ),
        ("warning", {"message": "scoring failed"}, "warning: scoring failed"),
        ("member", {"member_id": "r-0", "role": "rollout", "what": "joined"}, "r-0 (rollout) joined"),
        ("session", {"session": 2}, "learner session 2 begins and loads the model"),
        ("novel", {"a": 1}, 'novel: {"a": 1}'),
    ],
)
def test_each_kind_of_event_has_its_line(kind: str, content: dict[str, object], line: str) -> None:
    assert render.event_line(kind, content) == line


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min"), (273600, "3 d 4 h")],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert render.duration(seconds) == text


def test_up_waits_for_its_own_coordinator_without_limit(
    spec_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[dict[str, Any]] = []

    class Clusterless(LocalCluster):
        """Cluster that starts nothing."""

        def start_coordinator(self) -> str:
            return "127.0.0.1:1"

    class Recording(Client):
        """Client that records how long it would wait."""

        def __init__(self, address: str, **options: Any) -> None:
            patience.append(options)
            raise PacelineError("that is all")

    monkeypatch.setattr("paceline.services.cli.running.up.LocalCluster", Clusterless)
    monkeypatch.setattr("paceline.services.cli.running.up.Client", Recording)
    result = paceline("up", str(spec_path), "--directory", str(tmp_path / "runs"))
    assert "that is all" in result.output
    assert patience == [{"wait_s": math.inf, "reconnect_s": math.inf}]


def test_up_refuses_bad_data_before_any_worker_starts(spec_path: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("not json\n")
    runs = tmp_path / "runs"
    result = paceline("up", str(spec_path), "--directory", str(runs), "--port", "0")
    assert result.exit_code == 1
    started, error = result.stderr.splitlines()
    assert started.startswith("coordinator at 127.0.0.1:")
    assert error.startswith(f"Error: {tmp_path / 'train.jsonl'}, line 1, column 1: not valid JSON")
    assert sorted(path.name for path in (runs / "logs").glob("*.log")) == ["coordinator.log", "fork-server.log"]


def test_a_run_on_examples_has_no_number_of_trained_tokens() -> None:
    """The books count the tokens of groups; a zero would be wrong."""
    facts: render.Facts = {
        "run_id": "sft-1",
        "state": "succeeded",
        "message": "",
        "step": 600,
        "max_num_steps": 600,
        "groups": {},
        "tokens": {"generated": 0, "trained": 0},
        "age_s": 8.0,
        "priority": 0,
        "queue_place": 0,
    }
    column = render.RUN_COLUMNS.index("trained tokens")
    assert render.run_row(facts)[column] == "-"
    assert render.run_row(facts | {"tokens": {"generated": 2000, "trained": 1500}})[column] == "1,500"


@pytest.mark.parametrize("command", ["runs", "members", "ledger verify", "models list"])
def test_a_token_file_that_is_not_there_is_named(tmp_path: Path, command: str) -> None:
    missing = tmp_path / "nosuch.token"
    done = paceline(*command.split(), "--token-file", missing)
    assert done.exit_code == 2
    assert "nosuch.token' does not exist" in " ".join(done.output.split())
