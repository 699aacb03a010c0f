"""Result files: read as they were written, refused if they were changed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError, NotFound
from paceline.models.evaluation_results import (
    RESULT,
    SAMPLES,
    digest_of,
    folder_digest,
    problem_id,
    read_result,
    write_result,
)

SAMPLE = {"problem": problem_id("1+1="), "reward": 1.0, "rewards": {"exact_match": 1.0}, "completion": "2 €"}


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = write_result(tmp_path / "new", {"metrics": {}, "digests": {"spec": "a"}}, [SAMPLE, SAMPLE])
    result, samples = read_result(tmp_path / "new")
    assert result == written
    assert samples == [SAMPLE, SAMPLE]
    assert read_result(tmp_path / "new" / RESULT) == (result, samples)
    assert result["digests"].keys() == {"spec", "samples"}


@pytest.mark.parametrize(("name", "old", "new"), [(RESULT, '"spec": "a"', '"spec": "b"'), (SAMPLES, "1.0", "0.0")])
def test_a_changed_file_is_refused(tmp_path: Path, name: str, old: str, new: str) -> None:
    write_result(tmp_path, {"metrics": {}, "digests": {"spec": "a"}}, [SAMPLE])
    file = tmp_path / name
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(DataError, match=f"{name} was changed"):
        read_result(tmp_path)


def test_files_that_are_no_result_are_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="paceline eval"):
        read_result(tmp_path)
    write_result(tmp_path, {"metrics": {}}, [SAMPLE])
    (tmp_path / RESULT).write_text("[]")
    with pytest.raises(DataError, match="not an evaluation of format 1"):
        read_result(tmp_path)
    (tmp_path / RESULT).write_text("{")
    with pytest.raises(DataError, match="not valid JSON"):
        read_result(tmp_path)


@pytest.mark.parametrize(
    ("sample", "fault"),
    [
        ("x", "Input should be a valid dictionary"),
        ({"reward": 1.0, "rewards": {}}, "problem: Field required"),
        (SAMPLE | {"reward": {}}, "reward: Input should be a valid number"),
        (SAMPLE | {"reward": "1"}, "reward: Input should be a valid number"),
        (SAMPLE | {"rewards": {"exact_match": []}}, "rewards.exact_match: Input should be a valid number"),
        (SAMPLE | {"problem": []}, "problem: Input should be a valid string"),
    ],
)
def test_malformed_samples_are_refused_although_their_digest_matches(tmp_path: Path, sample: Any, fault: str) -> None:
    write_result(tmp_path, {"metrics": {}}, [SAMPLE, sample])
    with pytest.raises(DataError, match=re.escape(fault)) as refused:
        read_result(tmp_path)
    assert SAMPLES in str(refused.value)


@pytest.mark.parametrize(
    "result", [{}, {"metrics": []}, {"metrics": {"reward": 1.0}}, {"metrics": {"reward": {"value": "x"}}}]
)
def test_a_result_without_metrics_is_refused_although_its_digest_fits(tmp_path: Path, result: Any) -> None:
    write_result(tmp_path, result, [SAMPLE])
    with pytest.raises(DataError, match=f"{RESULT} is not an evaluation: metrics"):
        read_result(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"format": 1, "x": NaN}', '{"format": 1, "x": "\\ud800"}', "\xff"])
def test_a_file_without_a_json_form_is_refused(tmp_path: Path, text: str) -> None:
    write_result(tmp_path, {"metrics": {}}, [SAMPLE])
    (tmp_path / RESULT).write_bytes(text.encode("latin-1"))
    with pytest.raises(DataError, match=r"not valid JSON|was changed"):
        read_result(tmp_path)


def test_digests_see_order_of_keys_not_but_every_byte_of_a_folder(tmp_path: Path) -> None:
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "x").write_text("1")
    first = folder_digest(tmp_path)
    (tmp_path / "sub" / "x").write_text("2")
    assert folder_digest(tmp_path) != first
