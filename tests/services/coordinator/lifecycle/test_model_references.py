"""`run:ID` in place of a model: found at the submission, or refused with the runs that have exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from exchange_drivers import make_spec

from paceline.errors import SpecError
from paceline.files.storage import Folder
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.run_queue import references, with_locations
from paceline.spec.reading import spec_to_yaml


class Bench:
    """A ledger with the run `sft-1`, whose large files are in a store."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ledger = Ledger(directory / "ledger.sqlite", store=f"memory://{directory.name}")
        self.store = f"{self.ledger.store}/sft-1"
        self.ledger.add_run("sft-1", spec_to_yaml(make_spec(directory)), str(directory / "sft-1"))

    def spec(self, **sections: Any) -> Any:
        return make_spec(self.directory, **sections)

    def resolved(self, value: str) -> str:
        spec = self.spec(policy={"model_name": value, "generation": {"max_new_tokens": 16}})
        return with_locations(spec, references(spec, self.ledger)).policy.model_name


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    made = Bench(tmp_path)
    yield made
    made.ledger.close()


def test_the_final_export_comes_first_then_the_newest_by_step(bench: Bench) -> None:
    assert bench.resolved("s3://bucket/model") == "s3://bucket/model"
    for name in ("step-9", "step-10", "now"):
        Folder(f"{bench.store}/exports/{name}").write("config.json", b"{}")
    Folder(f"{bench.store}/exports/step-11").write("adapter_config.json", b"{}")  # an adapter is no model
    assert bench.resolved("run:sft-1") == f"{bench.store}/exports/step-10"
    assert bench.resolved("run:sft-1/now") == f"{bench.store}/exports/now"
    Folder(f"{bench.store}/export").write("config.json", b"{}")
    bench.ledger.update_run("sft-1", export_path=f"{bench.store}/export")
    assert bench.resolved("run:sft-1") == f"{bench.store}/export"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("run:nosuch-1", "policy.model_name 'run:nosuch-1': this coordinator has no run 'nosuch-1'; no run has an"),
        (
            "run:sft-1",
            r"run sft-1 has exported no model \(the run is queued at step 0 of .*`paceline export sft-1`",
        ),
        ("run:sft-1/now", "run sft-1 has no export 'now'"),
    ],
)
def test_what_is_not_there_is_named_with_the_remedy(bench: Bench, value: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        bench.resolved(value)
    bench.ledger.update_run("sft-1", export_path=f"{bench.store}/export")
    with pytest.raises(SpecError, match="uns with exports: sft-1"):
        bench.resolved(value)


def test_a_runs_export_is_no_data(bench: Bench) -> None:
    with pytest.raises(SpecError, match=r"data.train 'run:sft-1': a run's export is a model; `paceline samples"):
        references(bench.spec(data={"train": "run:sft-1"}), bench.ledger)


def test_the_critic_and_the_tokenizer_take_references_too(bench: Bench) -> None:
    Folder(f"{bench.store}/exports/step-1").write("config.json", b"{}")
    policy = {"model_name": "none", "tokenizer_name": "run:sft-1", "generation": {"max_new_tokens": 16}}
    sections = {"policy": policy, "value": {"model_name": "run:sft-1"}, "grpo": {"advantage": "gae"}}
    spec = bench.spec(**sections)
    found = with_locations(spec, references(spec, bench.ledger))
    assert found.policy.tokenizer_name == found.value.model_name == f"{bench.store}/exports/step-1"


@pytest.mark.parametrize("function", ["reward_model", "process_reward_model"])
def test_a_reward_model_may_be_another_runs_export(bench: Bench, function: str) -> None:
    trained = spec_to_yaml(bench.spec(algorithm="rm"))
    bench.ledger.add_run("rm-1", trained, str(bench.directory / "rm-1"))
    exports = f"{bench.ledger.store}/rm-1/exports"

    def resolved(path: str) -> str:
        rewards = [{"function": "exact_match"}, {"function": function, "kwargs": {"path": path}}]
        spec = bench.spec(rewards=rewards)
        return str(with_locations(spec, references(spec, bench.ledger)).rewards[1].kwargs["path"])

    with pytest.raises(SpecError, match=r"rewards\.1\.kwargs\.path 'run:rm-1/newest': run rm-1 has no export 'newest'"):
        resolved("run:rm-1/newest")
    for name in ("step-2", "step-10"):
        Folder(f"{exports}/{name}").write("config.json", b"{}")
    assert resolved("run:rm-1") == f"{exports}/step-10"
    assert resolved("run:rm-1/step-2") == f"{exports}/step-2"
    assert resolved("run:rm-1/newest") == exports
    with pytest.raises(SpecError, match="run sft-1 has trained a language model; name a run with algorithm rm"):
        resolved("run:sft-1")
