"""Examples by step: a row that does not fit is named before the training, and the pairs for the reference are complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_policy import CPU

from paceline.errors import InvalidInput
from paceline.learner.objectives import objective_of
from paceline.learner.objectives.examples import ExampleSource, RowPair, check_rows
from paceline.services.demo.task import make_tokenizer
from paceline.spec import RunSpec

LENGTHS = (1, 4, 2, 9, 3)
"""Characters of each row's completion; the prompt has two, and an end of sequence follows."""


def spec_of(folder: Path, algorithm: str, limit: int, lengths: tuple[int, ...] = LENGTHS, **section: Any) -> RunSpec:
    rows = [
        {
            "prompt": f"{place}=",
            "completion": "7" * length,
            "chosen": "7" * length,
            "rejected": "8",
            "label": True,
        }
        for place, length in enumerate(lengths)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"num_examples_per_step": 5, "max_num_steps": 1, **section}
    return RunSpec.model_validate(
        {
            "algorithm": algorithm,
            "policy": {"model_name": "none", "max_total_sequence_length": limit},
            "data": {"train": str(folder / "rows.jsonl"), "shuffle": False},
            algorithm: sizes,
        }
    )


def source_of(folder: Path, algorithm: str, limit: int, **section: Any) -> ExampleSource:
    return make_source(spec_of(folder, algorithm, limit, **section))


def make_source(spec: RunSpec) -> ExampleSource:
    return ExampleSource(spec, make_tokenizer(), objective_of(spec))


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "orpo", "kto", "rm"])
def test_a_row_that_is_too_long_is_named_before_the_first_step(algorithm: str, tmp_path: Path) -> None:
    check_rows(source_of(tmp_path, algorithm, 12), CPU, rank=0)
    with pytest.raises(
        InvalidInput, match=r"row 3 of .*rows.jsonl: the text has 1[12] tokens, .*max_total_sequence_length is 10"
    ):
        check_rows(source_of(tmp_path, algorithm, 10), CPU, rank=0)


def test_rows_that_the_run_never_reaches_are_not_looked_at(tmp_path: Path) -> None:
    source = source_of(tmp_path, "sft", 10, num_examples_per_step=3)
    assert source.rows_used() == [0, 1, 2]
    check_rows(source, CPU, rank=0)


def test_anothers_completion_is_cut_where_it_would_not_fit(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, "kto", 12)
    source = make_source(spec)
    # Each row's own completion and then the next one's, each with its end of sequence.
    assert [len(s.completion_ids) for s in source.of_step(0, 0, 1)] == [2, 5, 5, 3, 3, 10, 10, 4, 4, 2]
    # With a prompt of six characters, row 2's own completion fits and the ten tokens of row 3's do not.
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows[2]["prompt"] = "22222="
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    long = make_source(spec)
    check_rows(long, CPU, rank=0)
    foreign = [s for s in long.of_step(0, 0, 1) if s.label and s.label.mismatched]
    assert [len(s.completion_ids) for s in foreign] == [5, 3, 6, 4, 2]


def test_kto_asks_about_its_own_and_the_next_ones_completions(tmp_path: Path) -> None:
    source = source_of(tmp_path, "kto", 12, num_examples_per_step=2, max_num_steps=3)
    # Batches of rows (0, 1), (2, 3), (4, 0): each with the other's completion.
    foreign = {(0, 1), (1, 0), (2, 3), (3, 2), (4, 0), (0, 4)}
    assert source.row_pairs() == sorted(RowPair(*pair) for pair in foreign | {(row, row) for row in range(5)})


def test_what_the_reference_said_comes_with_its_completion(tmp_path: Path) -> None:
    source = source_of(tmp_path, "kto", 12, num_examples_per_step=2, max_num_steps=3)
    source.set_reference({pair: [-10.0 * pair.prompt - pair.completions] for pair in source.row_pairs()})
    known = [(s.group_id, s.label.mismatched, s.label.reference_logprob) for s in source.of_step(2, 0, 1) if s.label]
    assert known == [(4, False, -44.0), (4, True, -40.0), (5, False, 0.0), (5, True, -4.0)]


def test_a_mixture_is_the_same_on_any_number_of_ranks_from_any_step(tmp_path: Path) -> None:
    names = []
    for name, prefix in (("small", "1"), ("large", "2")):
        path = tmp_path / f"{name}.jsonl"
        rows = [{"prompt": f"{prefix}{n}=", "completion": "7"} for n in range(4 if name == "small" else 40)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        names.append(str(path))
    spec = spec_of(tmp_path, "sft", 12, max_num_steps=6, num_examples_per_step=8)
    data = spec.data.model_copy(update={"train": tuple(names), "train_weights": (3.0, 1.0), "shuffle": True})
    spec = spec.model_copy(update={"data": data})
    tokenizer, source = make_tokenizer(), make_source(spec)

    def prompts(source: ExampleSource, step: int, ranks: int) -> list[str]:
        parts = [source.of_step(step, rank, ranks) for rank in range(ranks)]
        samples = sorted((s for part in parts for s in part), key=lambda sample: sample.group_id)
        return [tokenizer.decode(sample.prompt_ids) for sample in samples]

    steps = [prompts(source, step, 1) for step in range(6)]
    assert [prompts(make_source(spec), step, 2) for step in range(5, -1, -1)] == steps[::-1]
    drawn = [prompt for step in steps for prompt in step]
    assert sum(prompt.startswith("1") for prompt in drawn) == pytest.approx(36, abs=3)
    assert len(source.rows_used()) == len(set(drawn)), "rows of a repeated data set too"
