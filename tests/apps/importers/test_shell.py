"""Shell scripts are read without being run: what the script sets is in its place, what only a run knows is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.apps.importers.import_spec import import_config, read_overrides
from paceline.apps.importers.shell import commands, unresolved


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("a=x\nb=$a/y\nrun k=${b}.z", ["run", "k=x/y.z"]),
        ("export A=${A:-1}\nrun k=$A", ["run", "k=1"]),
        ("declare -x A=2\nrun k=$A", ["run", "k=2"]),
        ("a=3\nrun k=${a:-4} l=${b:-$a} m=${c:+x}${a:+y}", ["run", "k=3", "l=3", "m=y"]),
        ("E=${1:-vllm}\nrun k=$E", ["run", "k=vllm"]),
        ("a=2\nb=$((a * 3))\nrun k=$(( (a + b) / 2 )) l=$((a*$b-1))", ["run", "k=4", "l=11"]),
        ("t=\"['$HOME/a', '$HOME/b']\"\nrun k=\"$t\" # a comment\n", ["run", "k=['$HOME/a', '$HOME/b']"]),
        ('run a=1 \\\n  b=2 \\\n  c=\'x # y\' d="\\"q\\""', ["run", "a=1", "b=2", "c=x # y", 'd="q"']),
        ("O=(\n  a=1\n  # b=2\n  'c=3'\n)\nO+=(d=4)\nrun ${O[@]} \"${O[@]}\"", ["run", *(["a=1", "c=3", "d=4"] * 2)]),
        ("x=1; x+=2; run $x", ["run", "12"]),
    ],
)
def test_what_the_script_sets_is_in_its_place(script: str, words: list[str]) -> None:
    assert words in commands(script)


@pytest.mark.parametrize("text", ["$(date)", "$2", "${NODES}", "$((n * 2))", "a/$X/b"])
def test_what_only_a_run_knows_is_named(text: str) -> None:
    [[_, word]] = commands(f"run k={text}")
    assert unresolved(word)


@pytest.mark.parametrize(
    "text", ["'", '"', "${", "$((", "a=(", "$", "\\", "a=(b", '"${x', "$(", "${x:-", "${x[@]", "\x00"]
)
def test_a_script_that_ends_too_early_is_read_to_its_end(text: str) -> None:
    assert isinstance(commands(f"run {text}"), list)


def test_an_unknown_variable_is_noted_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 -m verl.trainer.main_ppo data.train_files=$TRAIN actor_rollout_ref.model.path=org/model \\\n"
        " +data.apply_chat_template_kwargs.reasoning_effort=medium data.val_files=v.parquet trainer.test_freq=5\n"
    )
    settings, notes = read_overrides(path)
    assert "data.train_files" not in settings
    assert notes == ["data.train_files is $TRAIN, and the script does not set $TRAIN; set it by hand"]
    tree = import_config("verl", path, ("data.train=t.parquet",)).tree
    assert tree["data"]["chat_template_kwargs"] == {"reasoning_effort": "medium"}
    assert tree["async_grpo"] == {"max_trajectory_age_steps": 0}
    assert tree["loss_fn"]["truncated_importance_sampling_ratio"] is None
    assert tree["grpo"]["val_at_start"] is True
