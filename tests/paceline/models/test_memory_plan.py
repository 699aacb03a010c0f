"""The plan: the load, remedies, and the values for `auto`. The shape is that of Llama 3.1 8B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_shapes import HALF_BILLION, spec_of
from public_configs import PUBLIC_CONFIGS

from paceline.errors import InvalidInput, SpecError
from paceline.models.memory_plan import (
    UNSHARED,
    Room,
    checked_plan,
    is_open,
    on_gpus,
    plan,
    planned,
    refusal,
    remedies,
    with_engine,
)
from paceline.models.shape import ModelShape, shape_of
from paceline.spec import RunSpec
from paceline.spec.keys import with_keys
from paceline.spec.reading import parse_spec, spec_to_yaml, submitted_spec

EIGHT_BILLION = PUBLIC_CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]
GB = 10**9
AUTO = {"activation_checkpointing": "auto", "train_mb_tokens": "auto"}


def shape() -> ModelShape:
    found = shape_of(EIGHT_BILLION)
    assert found is not None
    return found


def spec_on_gpus(ranks: int = 8, gpu_gb: float | None = 80, model: str = "m", **policy: Any) -> RunSpec:
    generation = {"backend": "vllm", "max_new_tokens": 4096, **policy.pop("generation", {})}
    return parse_spec(
        {
            "policy": {
                "model_name": model,
                "max_total_sequence_length": 8192,
                "train_mb_tokens": 8192,
                "generation": generation,
                **policy,
            },
            "data": {"train": "d"},
            "rewards": [{"function": "length"}],
            "cluster": {"learner_ranks": ranks, "rollout_workers": 8} | ({} if gpu_gb is None else {"gpu_gb": gpu_gb}),
        }
    )


def test_a_run_on_gpus_elsewhere_has_a_load_for_each_role() -> None:
    made = plan(spec_on_gpus(), shape(), Room())
    learner, rollout = made.loads
    assert made.estimate.kept_versions == (2 + 4) * shape().parameters // 8  # published and current weights
    assert made.mesh == (1, 8)
    assert learner.device == "each GPU of the learner"
    assert learner.room_bytes == 80 * GB
    assert learner.parts["weights"] == 4 * shape().parameters // 8
    assert rollout.device == "vLLM's share of each GPU"
    assert rollout.bytes == rollout.room_bytes == int(0.92 * 80 * GB)
    assert rollout.parts["weights"] == 2 * shape().parameters
    assert made.cached_tokens == rollout.parts["keys and values"] // (2 * 8 * 128 * 32 * 2)


def test_a_run_on_cpus_loads_the_host() -> None:
    spec = spec_of()
    half = shape_of(HALF_BILLION)
    assert half is not None
    made = plan(spec, half, Room(host_bytes=100 * GB))
    (host,) = made.loads
    assert (host.device, host.room_bytes, made.fits) == ("the host", 100 * GB, True)
    assert host.bytes == made.estimate.learner_bytes + made.estimate.sampler_bytes
    assert on_gpus(spec) == (False, False)
    assert not plan(spec, half, Room(host_bytes=10 * GB)).fits
    text = refusal(spec, half, Room(host_bytes=23 * GB))
    assert text.startswith("the host has 23.0 GB for an estimated 24.0 GB, of which ")
    assert text.endswith("; set logger.verify_versions=0")
    text = refusal(spec_of(logger={"verify_versions": 0}), half, Room(host_bytes=20 * GB))
    assert text.startswith("the host has 20.0 GB for an estimated 22.0 GB, of which ")
    assert text.endswith("; set policy.activation_checkpointing=selective")


def test_roles_that_share_a_gpu_are_added_up() -> None:
    cluster = {"learner_gpus": [0], "rollout_gpus": [0], "rollout_workers": 1}
    spec = spec_of(policy={"generation": {"backend": "vllm", "max_new_tokens": 32}}, cluster=cluster)
    half = shape_of(HALF_BILLION)
    assert half is not None
    made = plan(spec, half, Room(gpu_bytes=80 * GB))
    both, engine = made.loads
    assert both.device == "each GPU of learner and rollout"
    assert both.parts["engine all"] == engine.bytes == int(0.92 * 80 * GB)
    assert not made.fits
    found = remedies(spec, half, Room(gpu_bytes=80 * GB))
    assert found == {"policy.generation.vllm_cfg.gpu_memory_utilization": 0.6}
    native = plan(spec_of(cluster=cluster), half, Room(gpu_bytes=80 * GB))
    (both,) = native.loads
    assert {"moments", "engine weights"} < set(both.parts)


@pytest.mark.parametrize(
    ("changed", "ranks", "gpu_gb", "expected"),
    [
        ({"activation_checkpointing": "none"}, 8, 80, {"policy.activation_checkpointing": "selective"}),
        ({"activation_checkpointing": "none"}, 8, 36, {"policy.activation_checkpointing": "full"}),
        ({"activation_checkpointing": "full"}, 1, 80, {"cluster.learner_ranks": 2}),
        (
            {"activation_checkpointing": "full", "train_mb_tokens": 65_536},
            8,
            40,
            {"policy.train_mb_tokens": 16_384},
        ),
    ],
)
def test_a_load_that_does_not_fit_names_the_key_that_makes_it_fit(
    changed: dict[str, Any], ranks: int, gpu_gb: float, expected: dict[str, Any]
) -> None:
    spec = spec_on_gpus(ranks, gpu_gb, **changed)
    found = remedies(spec, shape(), Room())
    assert list(found) == list(expected)
    assert plan(with_keys(spec, found), shape(), Room()).fits
    assert found == expected
    (key, value) = next(iter(expected.items()))
    text = refusal(spec, shape(), Room())
    assert text.startswith(f"each GPU of the learner has {gpu_gb:.1f} GB for an estimated ")
    assert text.endswith(f"; set {key}={value}")


def test_offloaded_moments_are_the_hosts() -> None:
    usual = plan(spec_on_gpus(), shape(), Room())
    offloaded = plan(spec_on_gpus(optimizer={"lr": 1e-6, "offload": True}), shape(), Room())
    moments = usual.estimate.learner["moments"]
    assert usual.estimate.learner_bytes - offloaded.estimate.learner_bytes == moments
    (host,) = [load for load in offloaded.loads if load.parts.get("offloaded state of 8 ranks")]
    assert host.parts["offloaded state of 8 ranks"] == 8 * moments


def test_an_engine_that_does_not_fit_is_divided() -> None:
    large = shape_of({**EIGHT_BILLION, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80})
    assert large is not None
    spec = spec_on_gpus(64, activation_checkpointing="full")
    text = refusal(spec, large, Room())
    assert text.startswith("vLLM's share of each GPU has 73.6 GB for an estimated 1")
    assert text.endswith("set policy.generation.vllm_cfg.tensor_parallel_size=4")


def test_a_plan_without_a_remedy_says_so() -> None:
    spec = spec_on_gpus(1, 4, activation_checkpointing="full")
    assert "no setting alone makes it fit" in refusal(spec, shape(), Room())


def test_several_keys_are_named_where_one_is_not_enough() -> None:
    spec = spec_on_gpus(8, 24, activation_checkpointing="none", parallel={"shard": 8})
    found = remedies(spec, shape(), Room())
    assert len(found) == 2
    assert plan(with_keys(spec, found), shape(), Room()).fits
    assert " and " in refusal(spec, shape(), Room())
    for key in found:
        alone = {name: value for name, value in found.items() if name != key}
        assert not plan(with_keys(spec, alone), shape(), Room()).fits


@pytest.mark.parametrize(
    ("gpu_gb", "kind", "tokens"),
    [
        (192, "none", 16_384),
        (120, "none", 8192),
        (80, "selective", 8192),
        (40, "full", 16_384),
        (28, "full", 8192),
    ],
)
def test_auto_chooses_the_first_setting_that_fits(gpu_gb: float, kind: str, tokens: int) -> None:
    spec, said = planned(spec_on_gpus(8, gpu_gb, **AUTO), shape(), Room())
    assert (spec.policy.activation_checkpointing, spec.policy.train_mb_tokens) == (kind, tokens)
    assert plan(spec, shape(), Room()).learner_fits
    assert said == [
        f"policy.activation_checkpointing is {kind}, chosen by auto: a GPU has room for {gpu_gb:.1f} GB",
        f"policy.train_mb_tokens is {tokens}, chosen by auto: a GPU has room for {gpu_gb:.1f} GB",
        UNSHARED,
    ]


def test_auto_without_sizes_is_the_safe_choice() -> None:
    for found, why in (
        (None, "the model's config.json is not on this machine"),
        (shape(), "cluster.gpu_gb is not set"),
    ):
        spec, said = planned(spec_on_gpus(gpu_gb=None, **AUTO), found, Room())
        assert (spec.policy.activation_checkpointing, spec.policy.train_mb_tokens) == ("full", 8192)
        assert all(text.endswith(f", chosen by auto: {why}") for text in said if text != UNSHARED)
    assert is_open(spec_on_gpus())
    fixed = spec_on_gpus(generation={"max_batch_size": 256}, shared_prompts=True)
    assert planned(fixed, None, Room()) == (fixed, [])
    assert not is_open(fixed)


def test_prompts_are_shared_on_learners_known_to_be_on_cpus_unless_the_spec_decides() -> None:
    anywhere = spec_on_gpus(gpu_gb=None)
    on_cpus, on_gpus = with_keys(anywhere, {"cluster.device": "cpu"}), spec_on_gpus(8, 80)
    here = Room(host_bytes=64 * GB)
    for chosen in ("auto", True, False):
        for spec, room, by_auto in (
            (anywhere, here, True),
            (on_cpus, Room(), True),
            (anywhere, Room(), False),  # for a coordinator whose learners may have GPUs
            (on_gpus, here, False),
        ):
            shares = by_auto if chosen == "auto" else chosen
            resolved, said = planned(with_keys(spec, {"policy.shared_prompts": chosen}), None, room)
            assert resolved.policy.shared_prompts is shares
            assert (UNSHARED in said) == (chosen == "auto" and spec is on_gpus)


def test_one_auto_leaves_the_other_as_it_is() -> None:
    spec, _ = planned(spec_on_gpus(8, 40, activation_checkpointing="auto"), shape(), Room())
    assert (spec.policy.activation_checkpointing, spec.policy.train_mb_tokens) == ("full", 8192)
    spec, _ = planned(spec_on_gpus(8, 200, train_mb_tokens="auto", activation_checkpointing="full"), shape(), Room())
    assert (spec.policy.activation_checkpointing, spec.policy.train_mb_tokens) == ("full", 32_768)


def test_an_adapter_with_dropout_recomputes_nothing() -> None:
    lora = {"enabled": True, "dropout": 0.1}
    spec = parse_spec(
        {
            "algorithm": "sft",
            "policy": {"model_name": "m", "lora_cfg": lora, **AUTO},
            "data": {"train": "d"},
            "cluster": {"gpu_gb": 24},
        }
    )
    resolved, _ = planned(spec, shape(), Room())
    assert resolved.policy.activation_checkpointing == "none"


def test_a_spec_is_checked_where_the_models_sizes_are_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_BILLION))
    with pytest.raises(SpecError, match=r"set cluster.learner_ranks=2$"):
        checked_plan(spec_on_gpus(1, model=str(tmp_path), activation_checkpointing="full"))
    assert not is_open(checked_plan(spec_on_gpus(model=str(tmp_path), **AUTO)))
    unknown = spec_on_gpus(1, model="nowhere", **AUTO)
    assert checked_plan(unknown) == with_engine(unknown)[0]


def test_the_engine_follows_the_device() -> None:
    on_cpus, said = with_engine(spec_of())
    assert (on_cpus.policy.generation.backend, said) == ("native", [])
    cluster = {"learner_gpus": [0], "rollout_gpus": [1], "rollout_workers": 1}
    on_gpus, said = with_engine(spec_of(cluster=cluster))
    assert on_gpus.policy.generation.backend == "vllm"
    assert said == ["policy.generation.backend is vllm: auto, on GPUs"]
    without, said = with_engine(spec_of(cluster=cluster), has_vllm=False)
    assert without.policy.generation.backend == "native"
    assert said[0].endswith("vLLM is not installed on this machine; pip install 'paceline[vllm]'")
    elsewhere = with_engine(spec_of(cluster={"gpu_gb": 80}))[0]
    assert elsewhere.policy.generation.backend == "vllm"
    generation = {"vllm_cfg": {"tensor_parallel_size": 2}, "max_new_tokens": 32}
    by_setting = with_engine(spec_of(policy={"generation": generation}))[0]
    assert by_setting.policy.generation.backend == "vllm"
    generation = {"backend": "native", "max_batch_size": 5, "max_new_tokens": 32}
    named = spec_of(policy={"generation": generation}, cluster=cluster)
    assert with_engine(named) == (named, [])


def test_the_sequences_at_a_time_follow_engine_and_device() -> None:
    cluster = {"learner_gpus": [0], "rollout_gpus": [1], "rollout_workers": 1}
    sizes = {
        (backend, bool(on)): with_engine(
            spec_of(policy={"generation": {"backend": backend, "max_new_tokens": 32}}, cluster=on)
        )[0].policy.generation.max_batch_size
        for backend in ("auto", "native", "vllm")
        for on in ({}, cluster)
    }
    assert [size for size in sizes.values() if size != 64] == [256, 256]
    assert sizes["auto", True] == sizes["vllm", True] == 256


def test_vllm_gets_the_rest_of_a_gpu_shared_with_the_learner() -> None:
    cluster = {"learner_gpus": [0], "rollout_gpus": [0], "rollout_workers": 1}
    half = shape_of(HALF_BILLION)
    assert half is not None
    room = Room(gpu_bytes=80 * GB)
    spec, said = planned(spec_of(policy=AUTO, cluster=cluster), half, room)
    config = spec.policy.generation.vllm_cfg
    assert config.gpu_memory_utilization is not None
    assert 0.5 < config.gpu_memory_utilization < 0.92
    assert said[-2].startswith(
        f"policy.generation.vllm_cfg.gpu_memory_utilization is {config.gpu_memory_utilization}: "
    )
    made = plan(spec, half, room)
    assert made.fits
    assert made.loads[0].bytes > 0.9 * 80 * GB
    assert not is_open(spec)
    small, _ = planned(spec_of(policy=AUTO, cluster=cluster), half, Room(gpu_bytes=16 * GB))
    assert small.policy.activation_checkpointing == "selective"
    assert plan(small, half, Room(gpu_bytes=16 * GB)).fits


def test_a_mesh_that_the_ranks_do_not_make_is_refused() -> None:
    with pytest.raises(InvalidInput, match="do not multiply to 8"):
        plan(spec_on_gpus(parallel={"shard": 3}), shape(), Room())


def test_activation_checkpointing_may_be_true_or_false() -> None:
    for kind, given in (("full", "true"), ("none", "false"), ("selective", "selective")):
        text = spec_to_yaml(spec_on_gpus(activation_checkpointing=kind))
        assert f"activation_checkpointing: {kind}\n" in text
        text = text.replace(f"activation_checkpointing: {kind}\n", f"activation_checkpointing: {given}\n")
        assert submitted_spec(text).policy.activation_checkpointing == kind
    assert spec_on_gpus(activation_checkpointing=True).policy.activation_checkpointing == "full"
    with pytest.raises(SpecError, match=r"selective.*compile"):
        spec_on_gpus(activation_checkpointing="selective", compile=True)
