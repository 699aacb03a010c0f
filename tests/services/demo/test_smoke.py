"""The tiny run of `helm test`: its files are what a coordinator takes, and it succeeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from paceline.services.demo.smoke import main, write_run
from paceline.spec.reading import load_spec


def test_the_spec_is_valid_and_its_model_is_below_the_root(tmp_path: Path) -> None:
    spec = load_spec(write_run(tmp_path / "files", str(tmp_path / "store"), 3))
    assert spec.policy.model_name == str(tmp_path / "store" / "model")
    assert (tmp_path / "store" / "model" / "config.json").is_file()
    assert spec.grpo.max_num_steps == 3
    assert Path(spec.data.train).is_file()


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = CliRunner().invoke(main, [str(tmp_path / "files"), "--model-root", str(tmp_path / "file")])
    assert answer.exit_code == 1
    assert str(tmp_path / "file") in answer.output


@pytest.mark.slow
def test_the_run_succeeds(tmp_path: Path) -> None:
    spec = write_run(tmp_path / "files", str(tmp_path / "store"), 2)
    command = [
        sys.executable,
        "-c",
        "from paceline.services.cli.main import main; main()",
        "up",
        str(spec),
        "--directory",
        str(tmp_path / "runs"),
        "-q",
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "succeeded after 2 of 2 steps" in ended.stdout
    assert "fork server" not in ended.stderr
    assert (tmp_path / "runs" / "logs" / "fork-server.log").read_text() == ""
