"""Compiled layers and padded rows give the numbers of the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_checks import loss_of, samples
from model_zoo import WORKING
from tiny_policy import CPU, make_spec, save_tiny_policy

from paceline.errors import InvalidInput
from paceline.learner.batch.samples import PackedBatch, TrainingSample, pack_samples
from paceline.learner.model import policy as compiled_layers
from paceline.learner.model.policy import ROW_MULTIPLE, load_policy, packed_logprobs, padded_row


def row(*lengths: int) -> PackedBatch:
    rng = np.random.default_rng(0)
    draw = [[rng.integers(0, 23, n).astype(np.int32) for n in (3, length)] for length in lengths]
    return pack_samples([TrainingSample(1, prompt, completion) for prompt, completion in draw], CPU)


def test_padding_is_a_sequence_by_itself_that_nothing_reads() -> None:
    packed = row(9, 9, 4)
    num_tokens = packed.input_ids.shape[1]
    padded = padded_row(packed)
    assert padded.input_ids.shape == padded.position_ids.shape == (1, ROW_MULTIPLE)
    assert torch.equal(padded.position_ids[0, :num_tokens], packed.position_ids[0])
    assert padded.position_ids[0, num_tokens:].tolist() == list(range(ROW_MULTIPLE - num_tokens))
    assert padded.layout.runs == ((2, 11), (1, 6), (1, ROW_MULTIPLE - num_tokens))
    assert padded.layout.starts.tolist() == [0, 11, 22, 28, ROW_MULTIPLE]
    assert padded.layout.max_length == ROW_MULTIPLE - num_tokens
    assert padded.predictors_N.max() < num_tokens
    full = row(ROW_MULTIPLE - 2)
    assert padded_row(full) is full


def shared_row() -> PackedBatch:
    rng = np.random.default_rng(1)
    prompt, *completions = (rng.integers(0, 23, n).astype(np.int32) for n in (20, 6, 3, 1))
    return pack_samples([TrainingSample(1, prompt, each) for each in completions], CPU, share=True)


@pytest.fixture(params=["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def graphs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Compile by this backend, and list the graphs. `eager` finds the same graphs and runs them without generated code."""
    from torch._dynamo.backends.registry import lookup_backend

    backend, found = lookup_backend(request.param), []

    def keep(graph: Any, inputs: Any) -> Any:
        found.append(graph)
        return backend(graph, inputs)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile_(function, backend=keep))
    torch._dynamo.reset()
    return found


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it otherwise
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_equals_plain(tmp_path: Path, graphs: list[Any], checkpointing: bool) -> None:
    folder = save_tiny_policy(tmp_path)
    plain = load_policy(make_spec(folder).policy, CPU)
    spec = make_spec(folder, compile=True, activation_checkpointing=checkpointing)
    compiled = load_policy(spec.policy, CPU)
    # Rows of three padded lengths, two of the first with other sequences in them.
    counts = []
    for packed in (row(9, 9, 4), row(ROW_MULTIPLE, 5), shared_row(), row(60, 60, 60, 60, 60)):
        found = []
        for model in (plain, compiled):
            model.zero_grad()
            logprobs_N, entropy_N = packed_logprobs(model, packed, temperature=0.7, chunk_tokens=7)
            logprobs_N.mean().backward()
            found.append([logprobs_N.detach(), entropy_N, *(p.grad for p in model.parameters())])
        for expected, got in zip(*found, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts[1] == counts[2] == counts[3], "from the second length on a graph has any length"


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it otherwise
def test_graphs_do_not_grow_with_the_number_of_runs(tmp_path: Path, graphs: list[Any]) -> None:
    spec = make_spec(save_tiny_policy(tmp_path), compile=True)
    compiled = load_policy(spec.policy, CPU)
    counts = []
    for runs in range(1, 31):
        packed = row(*range(5, 5 + runs))
        logprobs_N, _ = packed_logprobs(compiled, packed, temperature=0.7, chunk_tokens=7)
        logprobs_N.mean().backward()
        counts.append(len(graphs))
    assert counts[0] > 0
    assert set(counts[10:]) == {counts[10]}, "rows of eleven runs are longer than ROW_MULTIPLE"


def test_a_machine_without_a_compiler_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def fails() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fails)
    spec = make_spec(save_tiny_policy(tmp_path), compile=True)
    with pytest.raises(InvalidInput, match=r"policy\.compile is true, but .* no C\+\+ compiler"):
        load_policy(spec.policy, CPU)
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: False)
    with pytest.raises(InvalidInput, match=r"policy\.compile is true, but Triton"):
        compiled_layers.compile_layers([], torch.device("cuda"))


@pytest.mark.merge
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_layers_with_states_stay_outside_of_the_graphs(tmp_path: Path) -> None:
    (architecture,) = (each for each in WORKING if each.class_name == "Qwen3_5")
    architecture.make().save_pretrained(tmp_path)
    logprobs_N, gradients = loss_of(tmp_path, samples())
    compiled_N, compiled = loss_of(tmp_path, samples(), compile=True)
    torch.testing.assert_close(compiled_N, logprobs_N, atol=2e-5, rtol=0.0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(compiled[name], gradient, atol=2e-4, rtol=1e-4, msg=name)
