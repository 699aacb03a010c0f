"""A worker's engine settings: their keys, their effects, and refused ones."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from paceline.errors import InvalidInput
from paceline.services.rollout.worker import engine_option, with_engine_settings
from paceline.spec.reading import spec_from_yaml

SPEC = """
policy:
  model_name: org/model
  generation:
    backend: vllm
    max_new_tokens: 7
    vllm_cfg: {tensor_parallel_size: 4}
    vllm_kwargs: {enable_chunked_prefill: true}
data: {train: org/data}
rewards: [{function: length}]
"""


def test_nothing_given_nothing_changed() -> None:
    spec = spec_from_yaml(SPEC)
    assert with_engine_settings(spec, ()) is spec


def test_sizes_of_one_worker() -> None:
    spec = spec_from_yaml(SPEC)
    own = with_engine_settings(spec, ("max_batch_size=256", "vllm_cfg.tensor_parallel_size=2"))
    generation = own.policy.generation
    assert (generation.max_batch_size, generation.vllm_cfg.tensor_parallel_size) == (256, 2)
    assert generation.vllm_kwargs == {"enable_chunked_prefill": True}
    expected = spec.model_dump()
    expected["policy"]["generation"] |= {"max_batch_size": 256}
    expected["policy"]["generation"]["vllm_cfg"]["tensor_parallel_size"] = 2
    assert own.model_dump() == expected, "what is sampled is the run's"


def test_another_engine_drops_the_settings_of_vllm() -> None:
    generation = with_engine_settings(spec_from_yaml(SPEC), ("backend=native",)).policy.generation
    assert (generation.backend, generation.vllm_kwargs, generation.vllm_cfg.tensor_parallel_size) == (
        "native",
        {},
        1,
    )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (("backend=tgi",), "backend"),
        (("max_batch_size=none",), "max_batch_size"),
        (("backend=native", "vllm_cfg.tensor_parallel_size=2"), "vllm_cfg"),
        (("vllm_cfg.no_such=1",), "no_such"),
    ],
)
def test_settings_that_no_spec_may_have(settings: tuple[str, ...], named: str) -> None:
    with pytest.raises(InvalidInput, match="does not fit the run") as caught:
        with_engine_settings(spec_from_yaml(SPEC), settings)
    assert named in str(caught.value)
    assert settings[0] in str(caught.value)


@click.command()
@engine_option
def command(engine_settings: tuple[str, ...]) -> None:
    click.echo(" ".join(engine_settings))


@pytest.mark.parametrize("given", ["temperature=0.7", "max_new_tokens=8", "max_batch_size", "policy.seed=1"])
def test_what_is_sampled_is_not_a_workers_to_choose(given: str) -> None:
    refused = CliRunner().invoke(command, ["--engine", given])
    assert refused.exit_code == 2
    assert f"--engine '{given}' must be KEY=VALUE" in refused.output


def test_the_full_name_of_a_key_is_understood() -> None:
    given = ["--engine", "policy.generation.backend=vllm", "--engine", "vllm_kwargs.seed=3"]
    assert CliRunner().invoke(command, given).output == "backend=vllm vllm_kwargs.seed=3\n"
