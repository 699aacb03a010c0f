"""`paceline convert`: both ways, and every option that does not fit is a usage error that says what does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import paceline
from loaded_models import save_model
from safetensors.torch import load_file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_model("untied", tmp_path / "model")


def test_a_model_goes_to_a_checkpoint_and_back(model: Path, tmp_path: Path) -> None:
    there = paceline("convert", model, tmp_path / "dcp", "--to", "dcp", "--json")
    assert there.exit_code == 0, there.output
    assert json.loads(there.stdout) == {"source": str(model), "path": str(tmp_path / "dcp"), "to": "dcp"}
    back = paceline("convert", tmp_path / "dcp", tmp_path / "back", "--dtype", "float32")
    assert back.exit_code == 0, back.output
    found = load_file(tmp_path / "back" / "model.safetensors")
    for file in model.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            assert torch.equal(found[name], tensor.float())
    again = paceline("convert", tmp_path / "dcp", tmp_path / "back")
    assert again.exit_code == 1
    assert "never overwrites" in again.output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "nothing to convert: give --to dcp"),
        (["--key", "model"], "--config and --key are for a checkpoint"),
        (["--quantize", "int8", "--dtype", "float32"], "--quantize cannot be combined"),
    ],
)
def test_options_that_do_not_fit_a_model_are_refused(
    model: Path, tmp_path: Path, options: list[str], expected: str
) -> None:
    done = paceline("convert", model, tmp_path / "out", *options)
    assert done.exit_code == 2
    assert expected in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()


def test_options_that_do_not_fit_a_checkpoint_are_refused(model: Path, tmp_path: Path) -> None:
    paceline("convert", model, tmp_path / "dcp", "--to", "dcp")
    for options, expected in (
        (["--to", "dcp"], "omit --to dcp"),
        (["--quantize", "int8"], "convert the checkpoint to a model folder first"),
    ):
        done = paceline("convert", tmp_path / "dcp", tmp_path / "out", *options)
        assert done.exit_code == 2
        assert expected in " ".join(done.output.split())
