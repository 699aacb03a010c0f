"""Shell scripts are read without being run: what the script sets is in its place, what only a run knows is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.apps.importers.import_spec import import_config, read_overrides
from paceline.apps.importers.shell import commands, unresolved
from paceline.errors import SpecError


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


@pytest.mark.parametrize("text", ["$(date)", "$2", "${NODES}", "$((n * 2))", "a/$X/b", "${1}", "$$", "`x`", "${G[@]}"])
def test_what_only_a_run_knows_is_named(text: str) -> None:
    [[_, word]] = commands(f"run k={text}")
    assert unresolved(word)


@pytest.mark.parametrize("text", ["${", "$((", "a=(", "$", "\\", "a=(b", "$(", "${x:-", "${x[@]", "\x00", "<<A", ">"])
def test_a_script_that_ends_too_early_is_read_to_its_end(text: str) -> None:
    assert isinstance(commands(f"run {text}"), list)


@pytest.mark.parametrize("text", ["'", '"', '"${x', "a='b\nc"])
def test_a_quote_that_is_not_closed_is_one_error(text: str) -> None:
    with pytest.raises(SpecError, match="the quote in line 2 is not closed"):
        commands(f"echo\nrun {text}")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("run a=1 2>&1 >log | tee x", ["run", "a=1"]),
        ("cat <<'EOF' >file\nit's\nEOF\nrun a=1", ["run", "a=1"]),
        ("# old \\\n# a=1 \\\nrun a=2", ["run", "a=2"]),
        ("if [ -z $A ]; then A=1; fi\nrun a=$A", ["run", "a=1"]),
        ("if x; then A=1; else A=2; fi\nrun a=$A", ["run", "a=${A}"]),
        ("declare -i N=4\n: ${M:=q}\nrun n=$N m=$M", ["run", "n=4", "m=q"]),
        ("A=()\nA+=x\nrun a=$((A+1)) b=${A}", ["run", "a=$((A+1))", "b=x"]),
    ],
)
def test_what_is_no_word_of_the_command_is_left_out(script: str, words: list[str]) -> None:
    assert words in commands(script)


@pytest.mark.parametrize("inside", ["a;b", "a&b", "a<b", "a|b", "a(b", "a \\\n b", ";", "\\\n"])
def test_an_odd_array_is_read_to_its_end(inside: str) -> None:
    assert ["run", "z=1"] in commands(f"A=({inside})\nrun z=1")


def test_expansions_that_give_too_much_are_refused() -> None:
    with pytest.raises(SpecError, match="give more than 8388608 characters together"):
        commands(f"A={'a' * 60_000}\nrun " + "$A" * 10_000)


def test_a_value_that_grows_without_bound_is_refused() -> None:
    with pytest.raises(SpecError, match="has more than 65536 characters"):
        commands("A=aaaaaaaa\n" + "A=$A$A\n" * 20)


def test_an_unknown_variable_is_noted_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 -m verl.trainer.main_ppo data.train_files=$TRAIN actor_rollout_ref.model.path=org/model \\\n"
        " +data.apply_chat_template_kwargs.reasoning_effort=medium data.val_files=v.parquet trainer.test_freq=5\n"
    )
    settings, notes = read_overrides(path)
    assert "data.train_files" not in settings
    assert notes == ["data.train_files is $TRAIN, and only a run of the script knows $TRAIN; set it by hand"]
    tree = import_config("verl", path, ("data.train=t.parquet",)).tree
    assert tree["data"]["chat_template_kwargs"] == {"reasoning_effort": "medium"}
    assert tree["async_grpo"] == {"max_trajectory_age_steps": 0}
    assert tree["loss_fn"]["truncated_importance_sampling_ratio"] is None
    assert tree["grpo"]["val_at_start"] is True


def test_a_variable_outside_quotes_is_several_words() -> None:
    script = 'MORE="a.b=1 \\\n  a.c=$N"\nN=3\nrun $MORE "$MORE" x$MORE\n'
    assert commands(script) == [["run", "a.b=1", "a.c=$N", "a.b=1   a.c=$N", "xa.b=1", "a.c=$N"]]


def test_the_beginning_of_a_value_that_a_branch_lengthens_stays() -> None:
    script = 'ALL="a.b=1"\nif true; then\n  ALL="$ALL a.c=2"\nelse\n  ALL="$ALL a.d=3"\nfi\nrun $ALL\n'
    assert commands(script)[-1] == ["run", "a.b=1", "${ALL}"]
