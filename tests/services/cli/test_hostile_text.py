"""What a model or a reward function wrote cannot do anything in a terminal: every command prints it as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_line import paceline
from trained_ledger import RUN_ID, Writer

from paceline.services.cli import chat, render
from paceline.services.cli.running import watching
from paceline.v1 import rollout_pb2

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m<script>alert(1)</script>\u202egnp.exe\u2066\r" + "long" * 250_000
UNSAFE = ("\x1b", "\x07", "\x9b", "\u202e", "\u2066", "\r")


def unsafe_in(text: str) -> list[str]:
    return [character for character in UNSAFE if character in text]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A ledger whose prompt, warning and message are hostile, of a run that has failed."""
    writer = Writer(tmp_path, str(tmp_path / "model"), {"prompt": HOSTILE, "answer": "2"})
    writer.train_a_step()
    with writer.ledger.transaction():
        writer.ledger.add_event(RUN_ID, "warning", {"message": HOSTILE})
        writer.ledger.add_event(RUN_ID, "member", {"what": HOSTILE, "member_id": HOSTILE, "role": HOSTILE})
        writer.ledger.add_event(RUN_ID, "state", {"state": "failed", "message": HOSTILE})
        writer.ledger.update_run(RUN_ID, state="failed", message=HOSTILE)
    writer.ledger.close()
    return tmp_path / "runs"


@pytest.mark.parametrize(
    "command",
    [
        ("runs",),
        ("watch", RUN_ID),
        ("samples", RUN_ID),
        ("samples", RUN_ID, "--best", "1"),
        ("metrics", RUN_ID),
        ("ledger", "verify", RUN_ID),
    ],
    ids=" ".join,
)
def test_commands_print_hostile_records_as_text(recorded: Path, command: tuple[str, ...]) -> None:
    result = paceline(*command, "--directory", recorded)
    assert result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output[:500]
    assert unsafe_in(result.output) == []
    if command[0] in ("runs", "watch", "samples"):
        assert "<script>alert(1)</script>\\u202egnp.exe" in result.output.replace("\n", "")


def test_a_completion_from_a_worker_is_printed_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    class Asked:
        def __init__(self, *_: Any):
            pass

        def __enter__(self) -> Asked:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def generate(self, prompt: str, **_: Any) -> list[Any]:
            return [rollout_pb2.GeneratedCompletion(text=f"{prompt}{HOSTILE}")]

    monkeypatch.setattr(chat, "Client", Asked)
    result = paceline("generate", "hello ")
    assert result.exit_code == 0, result.output
    assert unsafe_in(result.output) == []
    assert "hello \\x1b]0;owned\\x07" in result.output
    assert "long" * 250_000 in result.output


def test_the_run_in_front_of_a_queued_one_is_named_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    class Source:
        def runs(self) -> list[Any]:
            from paceline.v1 import run_pb2

            return [
                run_pb2.Run(run_id="first", state=run_pb2.RUN_STATE_PAUSED, message=HOSTILE),
                run_pb2.Run(run_id="second"),
            ]

    with watching.queue_shown(Source(), "second", None):  # type: ignore[arg-type]
        said = capsys.readouterr().err
    assert "second waits for first" in said
    assert unsafe_in(said) == []


def test_one_long_cell_pads_no_other_row(capsys: pytest.CaptureFixture[str]) -> None:
    render.print_table(["run", "message"], [["a-1", ""], ["a-2", "why " * 90], ["a-3", "short"]], empty="")
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) < 20 for line in lines] == [True, True, False, True]
