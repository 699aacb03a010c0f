"""Local paths of a spec that are not on this machine: each is named with its key, before any service starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

import paceline
from paceline.errors import SpecError
from paceline.services.cli.doctor import examine_spec
from paceline.services.cli.main import main
from paceline.services.local.room import missing_paths
from paceline.spec.reading import load_spec


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """A spec whose files are all there."""
    (tmp_path / "my-model").mkdir()
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "rewards.py").write_text("def letters(completions, **_):\n    return [0.0] * len(completions)\n")
    tree = {
        "policy": {"model_name": "./my-model", "max_total_sequence_length": 1024},
        "data": {"train": "./train.jsonl"},
        "rewards": [{"function": "rewards.py:letters"}],
    }
    path = tmp_path / "my.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.parametrize(
    ("override", "key", "remedy"),
    [
        ("policy.model_name=./my-modle", "policy.model_name: no folder", "did you mean 'my-model'?"),
        ("policy.tokenizer_name=/none/of/it", "policy.tokenizer_name: no folder", "no folder '/none/of'"),
        ("data.train=trian.jsonl", "data.train: no file", "did you mean 'train.jsonl'?"),
        ("data.train=[train.jsonl, more.csv]", "data.train: no file", "correct the path"),
        ("data.validation=./val.jsonl", "data.validation: no file", "correct the path"),
        ("data.train=parts/*.parquet", "data.train: no file matches", "correct the pattern"),
        (
            "rewards=[{function: reward_model, kwargs: {path: ./my-modle}}]",
            "rewards.0.kwargs.path: no folder",
            "did you mean 'my-model'?",
        ),
        (
            "rewards=[{function: reward.py:letters}]",
            "rewards.0.function: no file",
            "did you mean 'rewards.py'?",
        ),
    ],
)
def test_a_path_that_is_not_there_is_named_with_its_key(spec: Path, override: str, key: str, remedy: str) -> None:
    (sentence,) = missing_paths(load_spec(spec, [override]))
    assert sentence.startswith(key)
    assert remedy in sentence


@pytest.mark.parametrize(
    "override",
    [
        "data.train=train.jsonl",
        "data.train='*.jsonl'",
        "data.train=owner/name",
        "data.train=s3://bucket/rows.jsonl",
        "policy.model_name=owner/name",
        "policy.model_name=run:sums-1",
        "policy.model_name=s3://bucket/model",
        "rewards=[{function: exact_match}]",
    ],
)
def test_what_is_there_or_elsewhere_is_not_named(spec: Path, override: str) -> None:
    assert missing_paths(load_spec(spec, [override])) == []


def test_up_and_train_refuse_before_a_service_starts(spec: Path, tmp_path: Path) -> None:
    arguments = ["up", str(spec), "policy.model_name=./my-modle", "data.train=./trian.jsonl"]
    done = CliRunner().invoke(main, [*arguments, "--directory", str(tmp_path / "runs")])
    assert (done.exit_code, "coordinator" in done.output) == (1, False)
    assert [line.partition(": no")[0] for line in done.output.splitlines()] == [
        "Error: policy.model_name",
        "data.train",
    ]
    with pytest.raises(SpecError, match=r"policy.model_name: no folder"):
        paceline.train(spec, ["policy.model_name=./my-modle"], directory=tmp_path / "runs", show=None)
    assert not (tmp_path / "runs").exists()


def test_doctor_names_them(spec: Path) -> None:
    found = examine_spec(load_spec(spec, ["data.train=./trian.jsonl"]), [], 10**12)
    assert [(each.status, each.value[:20]) for each in found if each.name == "its files"] == [
        ("fault", "data.train: no file ")
    ]
