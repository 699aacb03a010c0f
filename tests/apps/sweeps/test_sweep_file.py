"""A sweep's file: what it may say, and what is told before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from sweep_coordinator import LR, SPEC

from paceline.apps.sweeps.sweep_file import Range, Sweep, check_sweep, load_sweep, overrides_of
from paceline.errors import SpecError
from paceline.spec.reading import load_spec


def written(folder: Path, sweep: object, **spec: object) -> tuple[Path, str]:
    (folder / "sweep.yaml").write_text(yaml.safe_dump(sweep, sort_keys=False))
    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC | spec))
    return folder / "sweep.yaml", str(folder / "spec.yaml")


def test_a_sweep_takes_its_name_from_its_file_and_whole_bounds_are_integers(tmp_path: Path) -> None:
    path, spec = written(tmp_path, {"trials": 3, "search": LR | {"policy.num_updates_per_step": {"low": 1, "high": 4}}})
    sweep = load_sweep(path)
    assert sweep.name == "sweep"
    parts = [part for part in sweep.search.values() if isinstance(part, Range)]
    assert [part.is_whole for part in parts] == [False, True]
    assert check_sweep(sweep, spec, ("grpo.max_num_steps=9",)).grpo.max_num_steps == 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trials": 0}, "trials: Input should be greater than 0, not 0"),
        ({"serach": {}}, "serach"),
        ({"search": {"policy.optimizer.lr": {"low": 2, "high": 1}}}, "low 2 must be below high 1"),
        (
            {"search": {"policy.optimizer.lr": {"low": 0.0, "high": 1.0, "log": True}}},
            "log needs a low above 0",
        ),
        ({"search": {"policy.optimizer.lr": {"choices": []}}}, "search.policy.optimizer.lr"),
        ({"start": [{"grpo.seed": 1}]}, "start.0 sets grpo.seed, which `search` does not vary"),
    ],
)
def test_a_faulty_file_is_told_with_the_field(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path, _ = written(tmp_path, {"trials": 3, "search": LR} | change)
    with pytest.raises(SpecError, match=r"sweep\.yaml") as caught:
        load_sweep(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "- 1", "trials: [", "&a [*a]"])
def test_what_is_no_mapping_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.yaml").write_text(text)
    with pytest.raises(SpecError, match=r"sweep\.yaml"):
        load_sweep(tmp_path / "sweep.yaml")


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"policy.optimizer.learning_rat": {"low": 1.0, "high": 2.0}}, "unknown key"),
        ({"policy.generation.top_p": {"low": 0.5, "high": 1.5}}, "search.policy.generation.top_p at"),
        ({"loss_fn.preset": {"choices": ["dapo", "no-such"]}}, "search.loss_fn.preset at 'no-such'"),
    ],
)
def test_a_key_or_bound_that_the_spec_refuses_is_told_before_anything_runs(
    tmp_path: Path, search: dict[str, object], message: str
) -> None:
    path, spec = written(tmp_path, {"trials": 3, "search": search})
    with pytest.raises(SpecError) as caught:
        check_sweep(load_sweep(path), spec, ())
    assert message in str(caught.value)


def test_a_metric_that_no_trial_would_have_is_told(tmp_path: Path) -> None:
    path, spec = written(
        tmp_path, {"trials": 3, "search": LR}, data={"train": "train.jsonl"}, grpo={"max_num_steps": 4}
    )
    with pytest.raises(SpecError, match=r"set data\.validation"):
        check_sweep(load_sweep(path), spec, ())
    path, spec = written(
        tmp_path,
        {"trials": 3, "search": LR, "of": "step"},
        data={"train": "train.jsonl"},
        grpo={"max_num_steps": 4},
    )
    check_sweep(load_sweep(path), spec, ())


def test_the_sweep_of_the_page_is_one_of_the_demos_spec(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    (block,) = re.findall(r"^```yaml\n(.*?)^```$", (root / "docs" / "use" / "sweeps.md").read_text(), flags=re.M | re.S)
    (tmp_path / "sweep.yaml").write_text(block)
    sweep = load_sweep(tmp_path / "sweep.yaml")
    check_sweep(sweep, str(root / "services" / "demo" / "grpo.yaml"), ())
    assert sweep == Sweep(name="lr", trials=12, search=sweep.search, start=sweep.start, pruning=sweep.pruning)


def test_small_numbers_stay_numbers_as_overrides(tmp_path: Path) -> None:
    _, spec = written(tmp_path, {})
    values = {"policy.optimizer.lr": 1e-5, "policy.num_updates_per_step": 2, "loss_fn.preset": "dapo"}
    loaded = load_spec(spec, overrides_of(values))
    assert (loaded.policy.optimizer.lr, loaded.policy.num_updates_per_step, loaded.loss_fn.preset) == (
        1e-5,
        2,
        "dapo",
    )
