"""Attention over rows with shared prompts against attention over rows in which each completion has a copy of its prompt."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_zoo import WORKING, Architecture
from tiny_policy import CPU, make_spec
from torch import Tensor

from paceline.learner.batch.samples import SequenceLayout, SharedPrompt, TrainingSample, pack_samples
from paceline.learner.model import attention, shared_attention
from paceline.learner.model.attention import packed_attention
from paceline.learner.model.policy import load_policy, packed_logprobs, padded_row

LAYOUT = SequenceLayout.of(
    [7, 5, 4, 4, 3, 3, 6, 2], CPU, [SharedPrompt(0, 7, (5, 4, 0, 4)), SharedPrompt(26, 6, (2, 0))]
)
"""A prompt of 7 tokens with four completions, two sequences of 3 tokens, and a prompt of 6 with two completions."""


def arrays(dtype: torch.dtype, key_value_heads: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(1, heads, 34, 16) for heads in (4, key_value_heads, key_value_heads)] + [(4,)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


def by_copies(q: Tensor, k: Tensor, v: Tensor, sinks_H: Tensor | None, window: int | None) -> Tensor:
    """Return [34, H, D] from a softmax over the written out keys of each token, by torch alone."""
    keys_of: list[list[int]] = [list(range(i + 1)) for i in range(7)]
    for begin, length in ((7, 5), (12, 4), (16, 4)):
        keys_of += [[*range(7), *range(begin, begin + i + 1)] for i in range(length)]
    for begin in (20, 23, 26):
        keys_of += [list(range(begin, begin + i + 1)) for i in range(6 if begin == 26 else 3)]
    keys_of += [[*range(26, 32), *range(32, 32 + i + 1)] for i in range(2)]
    repeats = q.shape[1] // k.shape[1]
    k, v = (x[0].repeat_interleave(repeats, dim=0) for x in (k, v))
    results = []
    for token, keys in enumerate(keys_of):
        seen = keys if window is None else keys[-window:]
        scores_HL = (k[:, seen] @ q[0, :, token, :, None])[..., 0] * 0.3
        if sinks_H is not None:
            scores_HL = torch.cat((scores_HL, sinks_H[:, None]), dim=1)
        weights_HL = scores_HL.softmax(-1)[:, : len(seen)]
        results.append((weights_HL[..., None] * v[:, seen]).sum(1))
    return torch.stack(results)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 5, 8, 11])
@pytest.mark.parametrize("key_value_heads", [2, 4])
@pytest.mark.parametrize("path", ["views", "copies"])
def test_a_completion_attends_to_its_prompt_and_itself(
    path: str, key_value_heads: int, window: int | None, with_sinks: bool
) -> None:
    q, k, v, sinks_H = arrays(torch.float64, key_value_heads)
    sinks = sinks_H if with_sinks else None
    if path == "views":
        options: dict[str, Any] = {"scaling": 0.3, "sliding_window": window, "s_aux": sinks}
        out = packed_attention(torch.nn.Identity(), q, k, v, None, layout=LAYOUT, **options)[0][0]
    else:  # as on CUDA without flash attention
        out = attention._by_runs(q, k, v, LAYOUT, 0.3, window, sinks)[0]
    expected = by_copies(q, k, v, sinks, window)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    inputs = [q, k, v, *([sinks_H] if with_sinks else [])]
    slopes = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=out.dtype)
    found = torch.autograd.grad(out, inputs, slopes)
    for gradient, exact in zip(found, torch.autograd.grad(expected, inputs, slopes), strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-11, atol=1e-11)


def test_no_mask_lives_until_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[weakref.ref[Tensor]] = []
    added = shared_attention._added

    def followed(attends: Tensor, like: Tensor) -> Tensor:
        mask = added(attends, like)
        masks.append(weakref.ref(mask))
        return mask

    monkeypatch.setattr(shared_attention, "_added", followed)
    q, k, v, _ = arrays(torch.float64, 2)
    out, _ = packed_attention(torch.nn.Identity(), q, k, v, None, layout=LAYOUT, scaling=0.3, sliding_window=3)
    assert masks
    assert all(mask() is None for mask in masks)
    made = len(masks)
    out.sum().backward()
    assert len(masks) == 2 * made


def test_bfloat16_is_rounded_once_more_at_most() -> None:
    q, k, v, _ = arrays(torch.bfloat16, 2)
    found, _ = packed_attention(torch.nn.Identity(), q, k, v, None, layout=LAYOUT, scaling=0.3)
    exact = by_copies(q.double(), k.double(), v.double(), None, None)
    torch.testing.assert_close(found[0].double(), exact, rtol=2e-2, atol=2e-2)


def group(lengths: tuple[int, ...], prompt: int, group_id: int) -> list[TrainingSample]:
    rng = np.random.default_rng(group_id)
    prompt_ids = rng.integers(0, 23, prompt).astype(np.int32)
    return [TrainingSample(group_id, prompt_ids, rng.integers(0, 23, n).astype(np.int32)) for n in lengths]


@pytest.mark.merge
@pytest.mark.slow
@pytest.mark.parametrize("architecture", WORKING, ids=lambda each: each.family)
def test_a_model_of_every_family_has_the_same_gradients(architecture: Architecture, tmp_path: Path) -> None:
    check_gradients(architecture, tmp_path)


def test_a_row_that_is_padded_for_the_compiler_still_shares_its_prompts() -> None:
    packed = pack_samples(group((9, 4, 1), 18, 1), CPU, share=True)
    padded = padded_row(packed)
    assert padded.layout.shared == packed.layout.shared == (SharedPrompt(0, 18, (8, 3, 0)),)
    assert padded.layout.runs == ((1, 18), (1, 8), (1, 3), (1, 99))
    assert padded.layout.unshared.layout.runs == ((1, 18), (1, 26), (1, 21), (1, 99))


@pytest.mark.parametrize("how", ["selective", "full"])
def test_recomputed_activations_change_nothing(how: str, tmp_path: Path) -> None:
    (architecture,) = (each for each in WORKING if each.family == "Qwen3")
    check_gradients(architecture, tmp_path, activation_checkpointing=how)


def check_gradients(architecture: Architecture, tmp_path: Path, **settings: Any) -> None:
    """Compare the gradients of a model with a row that shares prompts and with one that does not."""
    architecture.make().save_pretrained(tmp_path)
    batch = [*group((9, 4, 4, 1), 18, 1), *group((3,), 5, 2), *group((2, 7), 17, 3)]
    weights_N = torch.randn(sum(len(s.completion_ids) for s in batch), generator=torch.Generator().manual_seed(1))
    results = []
    for share in (False, True):
        policy = load_policy(make_spec(tmp_path, **settings).policy, CPU)
        packed = pack_samples(batch, CPU, share=share)
        logprobs_N, entropy_N = packed_logprobs(policy, packed, temperature=0.7, chunk_tokens=7)
        (logprobs_N * weights_N).sum().backward()
        results.append((packed.input_ids.numel(), logprobs_N, entropy_N, dict(policy.named_parameters())))
    (tokens, logprobs_N, entropy_N, parameters), shared = results
    assert shared[0] == tokens - 3 * 18 - 17
    torch.testing.assert_close(shared[1], logprobs_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shared[2], entropy_N, atol=1e-5, rtol=1e-5)
    for name, parameter in parameters.items():
        tolerance = 4e-5 * max(1.0, float(parameter.grad.abs().max()))
        torch.testing.assert_close(shared[3][name].grad, parameter.grad, atol=tolerance, rtol=1e-4)
