"""Untrusted YAML is parsed within limits and refused with a sentence beyond them."""

from __future__ import annotations

import sys
from itertools import chain, repeat

import pytest
import yaml

from paceline.errors import SpecError
from paceline.spec.bounded_yaml import (
    MAX_BYTES,
    MAX_NODES,
    MAX_READ_S,
    MAX_SCALAR,
    PythonEvents,
    StepwiseLoader,
    events_class,
    load,
)
from paceline.spec.reading import submitted_spec

BILLION = "a: &a [x, x]\n" + "".join(
    f"{name}: &{name} [*{before}, *{before}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


def test_valid_values_are_read_as_by_the_safe_loader() -> None:
    text = "name: x\ngrpo: {num_prompts_per_step: 2}\nlist: [1, 2.5, null, true, 2026-01-01]\ntext: |\n  a\n  b\n"
    assert load(text) == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (BILLION, "anchor or alias in line 1"),
        ("a: *b", "anchor or alias"),
        ("[" * 50_000, "more than 32 levels deep"),
        ("{" * 50_000, "more than 32 levels deep"),
        ("\n".join(f"k{number}: 1" for number in range(MAX_NODES)), f"more than {MAX_NODES} keys"),
        ("a: '" + "x" * (MAX_SCALAR + 1) + "'", "characters; at most 65536 are allowed"),
        ("x" * (MAX_BYTES + 1), "bytes; at most 1048576 are allowed"),
        ("a: " + "9" * 5000, "number in line 1 has 5000 characters and cannot be read"),
        ("a: 1" + "_" * 2000 + ".5", "number in line 1 has 2003 characters"),
        ("a: 2026-13-45", "cannot be read"),
        ("[", "not valid YAML"),
        ("!!python/object/apply:os.system [ls]", "not valid YAML"),
        ("? [a]\n: b", "not valid YAML"),
    ],
)
def test_a_text_beyond_the_limits_is_refused_with_a_sentence(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load(text)


def test_numbers_of_yaml_1_1_alone_are_texts() -> None:
    assert load("a: [1:30, 010, 0x10, 1_000, -0, 0.5]") == {"a": ["1:30", "010", 16, 1000, 0, 0.5]}


@pytest.mark.parametrize("readings", [3, 7], ids=["while it is read", "while values are made of it"])
def test_reading_ends_at_its_time_limit_with_a_sentence(readings: int) -> None:
    """The clock passes the limit after this many readings: one at the start, then two for each of 5 nodes."""
    times = chain([0.0] * readings, repeat(MAX_READ_S + 1.0))
    with pytest.raises(
        SpecError, match=r"reading the spec took longer than 10 s and only reached line \d; shorten the spec"
    ):
        load("a: 1\nb: 2\n", lambda: next(times))


def test_a_text_is_read_where_libyaml_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml.cyaml", None)
    assert events_class() is PythonEvents
    monkeypatch.undo()
    loader = PythonEvents("a: [1, 2]")
    events = []
    while loader.check_event():  # type: ignore[no-untyped-call]
        events.append(loader.get_event())  # type: ignore[no-untyped-call]
    assert [event.value for event in events if isinstance(event, yaml.ScalarEvent)] == ["a", "1", "2"]


def test_stored_specs_may_have_aliases_and_any_size() -> None:
    text = "a: &x [1, 2]\nb: *x\nc: " + "9" * 2000 + "\n"
    assert yaml.load(text, StepwiseLoader)["b"] == [1, 2]


def test_a_spec_of_many_faults_names_the_first() -> None:
    text = "\n".join(f"unknown_{number}: 1" for number in range(5000))
    with pytest.raises(SpecError) as caught:
        submitted_spec(text)
    assert "more faults" in str(caught.value)
    assert len(str(caught.value)) < 20_000


def test_a_path_that_no_file_system_takes_is_refused_by_its_key() -> None:
    tree = {
        "policy": {"model_name": "m" * 2000},
        "data": {"train": "t.jsonl"},
        "rewards": [{"function": "f.py:f"}],
    }
    with pytest.raises(SpecError, match=r"policy\.model_name is 'mmm"):
        submitted_spec(yaml.safe_dump(tree))
    tree["policy"] = {"model_name": "model\x00"}
    with pytest.raises(SpecError, match="not a path"):
        submitted_spec(yaml.safe_dump(tree))
