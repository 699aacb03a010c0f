"""Arguments and environment of vLLM, before it is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidInput
from paceline.groups import Version
from paceline.rollout.engines import create_engine
from paceline.rollout.vllm.arguments import engine_arguments, replicas
from paceline.rollout.vllm.requests import label_of, spans_so_far, version_of
from paceline.spec import RunSpec
from paceline.weights.model_layout import meta_layout, read_config


def arguments(spec: RunSpec, device: str = "cpu") -> dict[str, Any]:
    config = read_config(spec.policy)
    return engine_arguments(spec, config, meta_layout(config).architecture, device, False)


@pytest.fixture
def vllm_spec(make_spec: Callable[..., RunSpec], make_model: Callable[..., Any]) -> Callable[..., RunSpec]:
    return lambda **changes: make_spec(make_model(), backend="vllm", **changes)


def test_where_vllm_is_not_installed_the_error_says_how_to_get_it(
    vllm_spec: Callable[..., RunSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else there(name))
    with pytest.raises(InvalidInput, match=r"pip install 'paceline\[vllm\]'.*docs/use/vllm\.md"):
        create_engine(vllm_spec())


def test_a_cpu_gets_a_bounded_cache_whole_prompts_and_no_compilation(
    vllm_spec: Callable[..., RunSpec], tmp_path: Path
) -> None:
    on_cpu, on_gpu = (arguments(vllm_spec(vllm_cfg={}), device) for device in ("cpu", "cuda"))
    assert (on_cpu["enforce_eager"], on_gpu["enforce_eager"]) == (True, False)
    assert (on_cpu["dtype"], on_gpu["dtype"]) == ("float32", "bfloat16")
    assert on_cpu["enable_chunked_prefill"] is False
    assert on_cpu["max_num_batched_tokens"] >= on_cpu["max_model_len"] == 4096
    assert "enable_chunked_prefill" not in on_gpu
    assert on_cpu["load_format"] == "dummy"
    assert on_cpu["model"] == str(tmp_path)


def test_every_other_argument_is_passed_through(vllm_spec: Callable[..., RunSpec]) -> None:
    spec = vllm_spec(
        vllm_cfg={"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 4},
        vllm_kwargs={"block_size": 64},
    )
    given = arguments(spec)
    sizes = [given[f"{axis}_parallel_size"] for axis in ("tensor", "pipeline", "data")]
    assert (sizes, given["block_size"], replicas(spec.policy)) == ([2, 3, 4], 64, 24)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.005}, r"temperature is 0\.005, but vLLM samples only at 0\.01 or above"),
    ],
)
def test_what_would_make_wrong_numbers_is_refused(
    vllm_spec: Callable[..., RunSpec], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        arguments(vllm_spec(**changes))


def test_versions_of_an_unfinished_sequence() -> None:
    assert version_of(label_of(Version(3, 17))) == Version(3, 17)
    starts = [("1.0", 0), ("1.1", 5), ("1.2", 9)]
    assert spans_so_far(starts, 7) == [("1.0", 0, 5), ("1.1", 5, 7)]
    assert spans_so_far(starts, 9) == [("1.0", 0, 5), ("1.1", 5, 9)]


def test_a_float32_head_is_vllms_own(vllm_spec: Callable[..., RunSpec]) -> None:
    assert "head_dtype" not in arguments(vllm_spec()).get("hf_overrides", {})
    spec = vllm_spec(vllm_kwargs={"hf_overrides": {"rope_theta": 1.0}})
    spec = spec.model_copy(update={"policy": spec.policy.model_copy(update={"float32_head": True})})
    given = arguments(spec)["hf_overrides"]
    assert (given["head_dtype"], given["rope_theta"]) == ("float32", 1.0)
