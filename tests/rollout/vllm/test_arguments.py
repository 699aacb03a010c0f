"""Arguments and environment of vLLM, before it is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import LlamaConfig

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
    spec = vllm_spec()
    spec = spec.model_copy(update={"policy": spec.policy.model_copy(update={"float32_head": True})})
    assert arguments(spec)["hf_overrides"]["head_dtype"] == "float32"


def test_speculation_is_vllms_own_with_the_draft_models_likeliest_tokens(
    vllm_spec: Callable[..., RunSpec], make_model: Callable[..., Any], tmp_path: Path
) -> None:
    assert "speculative_config" not in arguments(vllm_spec())
    ngram = {"method": "ngram", "num_speculative_tokens": 5}
    assert arguments(vllm_spec(vllm_cfg={"speculative": ngram}))["speculative_config"] == ngram | {
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    draft = tmp_path / "draft"
    make_model("llama").config.save_pretrained(draft)
    drafted = {"method": "draft_model", "num_speculative_tokens": 5, "model": str(draft)}
    spec = vllm_spec(vllm_cfg={"speculative": drafted})
    assert arguments(spec)["speculative_config"] == drafted | {
        "draft_load_config": {"load_format": "auto"},
        "draft_sample_method": "greedy",
    }
    config = LlamaConfig(**make_model("llama").config.to_diff_dict() | {"vocab_size": 24})
    config.save_pretrained(draft)
    with pytest.raises(InvalidInput, match=r"speculative\.model .* has 24 tokens, but the policy has 23"):
        arguments(spec)


@pytest.mark.parametrize(
    ("speculative", "changes", "message"),
    [
        ({"method": "eagle3"}, {}, "draft_model"),
        ({"method": "draft_model"}, {}, "method 'draft_model' with model None; only draft_model takes a model"),
        (
            {"model": "folder"},
            {},
            "method 'ngram' with model 'folder'; only draft_model takes a model, and it needs one",
        ),
        (
            {"method": "draft_model", "model": "run:sft-1"},
            {},
            "run:ID cannot name a draft model; write the export's folder",
        ),
        ({"prompt_lookup_min": 5}, {}, "prompt_lookup_min 5 exceeds prompt_lookup_max 4"),
        ({"num_speculative_tokens": 33}, {}, "less than or equal to 32"),
        ({}, {"min_p": 0.1}, r"speculative with min_p 0\.1: vLLM does not apply it to drafted tokens; remove one"),
        ({}, {"min_new_tokens": 2}, "speculative with min_new_tokens 2: vLLM forbids stop tokens at other positions"),
        ({}, {"tensor_parallel_size": 2}, "speculative with tensor_parallel_size 2: log-probabilities were not tested"),
    ],
)
def test_what_speculation_does_not_compute_exactly_is_refused(
    vllm_spec: Callable[..., RunSpec], speculative: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3} | speculative
    parallel = {name: changes.pop(name) for name in list(changes) if name.endswith("parallel_size")}
    with pytest.raises(ValueError, match=message):
        vllm_spec(vllm_cfg={"speculative": given} | parallel, allow_biased_sampling=True, **changes)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"logprobs_mode": "raw_logprobs"}, "logprobs_mode='raw_logprobs'; remove it, Paceline sets it"),
        ({"tensor_parallel_size": 2}, r"set policy\.generation\.vllm_cfg\.tensor_parallel_size instead"),
        ({"speculative_config": {}}, r"set policy\.generation\.vllm_cfg\.speculative instead"),
        ({"quantization": "fp8"}, "quantization='fp8'; remove it: sampled log-probabilities would not be those of a"),
        ({"hf_token": "hf_secret"}, "vllm_kwargs has hf_token; remove it: set the environment variable HF_TOKEN"),
        ({"no_such": 1}, "no_such=1; no such argument was tested; remove it, or write async_scheduling, block_size"),
        ({"blocksize": 1}, "blocksize=1; no such argument was tested; remove it, or write block_size"),
    ],
)
def test_an_argument_that_was_not_tested_is_refused_by_name(
    vllm_spec: Callable[..., RunSpec], kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message) as refused:
        vllm_spec(vllm_kwargs=kwargs)
    assert "hf_secret" not in refused.value.errors()[0]["msg"]


def test_a_prompt_in_parts_is_refused_on_a_cpu(vllm_spec: Callable[..., RunSpec]) -> None:
    spec = vllm_spec(vllm_kwargs={"enable_chunked_prefill": True})
    assert arguments(spec, "cuda")["enable_chunked_prefill"] is True
    with pytest.raises(InvalidInput, match="enable_chunked_prefill=True, but on a CPU vLLM cannot compute a seeded"):
        arguments(spec)
