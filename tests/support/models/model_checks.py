"""Comparison of the numbers of learner and export with those of plain transformers, for tiny models.

Each check raises AssertionError, or the error of the part that refuses the model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_zoo import Architecture
from tiny_policy import CPU, make_spec
from torch import Tensor
from transformers import AutoModelForCausalLM

from paceline.learner.batch.samples import TrainingSample, pack_samples
from paceline.learner.checkpoints.export import export_pretrained
from paceline.learner.model.policy import load_policy, packed_logprobs
from paceline.learner.weights.gather import gather_weights

AUTO: Any = AutoModelForCausalLM
TEMPERATURE = 0.7
LENGTHS = ((3, 9), (4, 8), (5, 1), (2, 4))
"""Tokens of prompt and completion; two rows of equal length, and some longer than the window of those that have one."""


def samples() -> list[TrainingSample]:
    """Return sequences in the order in which a row has them."""
    rng = np.random.default_rng(3)
    drawn = [[rng.integers(0, 23, n).astype(np.int32) for n in lengths] for lengths in LENGTHS]
    return [TrainingSample(1, prompt, completion) for prompt, completion in drawn]


def check_all(architecture: Architecture, folder: Path) -> None:
    """Save the architecture's model in `folder`, and run all checks on it."""
    architecture.make().save_pretrained(folder)
    plain = AUTO.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    check_learner(plain, folder)
    check_neighbours(folder)
    check_recomputation(folder)
    check_adapter(folder)
    check_bfloat16(plain, folder)
    check_export(plain, folder)


def check_learner(plain: Any, folder: Path) -> None:
    """Compare packed log-probabilities, entropies and gradients with those of one sequence at a time."""
    weights = [torch.randn(len(s.completion_ids), generator=torch.Generator().manual_seed(1)) for s in samples()]
    expected_N, expected_entropy_N = unpacked(plain)
    (expected_N * torch.cat(weights)).sum().backward()
    policy = load_policy(make_spec(folder).policy, CPU)
    logprobs_N, entropy_N = packed_logprobs(
        policy, pack_samples(samples(), CPU), temperature=TEMPERATURE, chunk_tokens=7
    )
    (logprobs_N * torch.cat(weights)).sum().backward()
    torch.testing.assert_close(logprobs_N, expected_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N, expected_entropy_N, atol=1e-5, rtol=1e-5)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}
    for name, parameter in policy.named_parameters():
        if parameter.grad is None or expected[name] is None:
            assert parameter.grad is expected[name] is None, name
        else:
            largest = float(expected[name].abs().max())
            torch.testing.assert_close(parameter.grad, expected[name], atol=2e-5 * max(largest, 1.0), rtol=0.0)


def loss_of(folder: Path, sequences: list[TrainingSample], **settings: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the log-probabilities of a packed row, and the gradients of their sum."""
    policy = load_policy(make_spec(folder, **settings).policy, CPU)
    logprobs_N, _ = packed_logprobs(policy, pack_samples(sequences, CPU), temperature=TEMPERATURE, chunk_tokens=7)
    logprobs_N.sum().backward()
    return logprobs_N.detach(), {name: parameter.grad for name, parameter in policy.named_parameters()}


def check_neighbours(folder: Path) -> None:
    """Put other tokens into one sequence of a row: no bit of the others may change; with experts, whose products are of as
    many rows as chose them, only the rounding."""
    first, *others = samples()
    logprobs_N, names = loss_of(folder, [first, *others])
    changed = TrainingSample(1, (first.prompt_ids + 1) % 23, (first.completion_ids + 1) % 23)
    changed_N, _ = loss_of(folder, [changed, *others])
    num_first = len(first.completion_ids)
    tolerance = 1e-5 if any(".experts" in name or ".block_sparse_moe" in name for name in names) else 0.0
    torch.testing.assert_close(changed_N[num_first:], logprobs_N[num_first:], atol=tolerance, rtol=0.0)
    assert not torch.equal(changed_N[:num_first], logprobs_N[:num_first])


def check_recomputation(folder: Path) -> None:
    """Compare the gradients with activation checkpointing with those without."""
    logprobs_N, gradients = loss_of(folder, samples())
    same_N, recomputed = loss_of(folder, samples(), activation_checkpointing="full")
    assert torch.equal(same_N, logprobs_N)
    for name, gradient in gradients.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=0.0, rtol=0.0, msg=name)


def check_adapter(folder: Path) -> None:
    """Check that an untrained adapter changes nothing, that it alone is trained, and that each part of it is reached."""
    logprobs_N, of_all = loss_of(folder, samples())
    same_N, gradients = loss_of(folder, samples(), lora_cfg={"enabled": True, "dim": 2, "alpha": 4})
    torch.testing.assert_close(same_N, logprobs_N, atol=1e-5, rtol=1e-5)
    reached = {name.replace(".lora_B.default", ""): is_any(x) for name, x in gradients.items() if ".lora_B." in name}
    assert reached
    assert reached == {name: is_any(of_all[name]) for name in reached}
    assert all(x is None for name, x in gradients.items() if ".lora_" not in name)


def is_any(gradient: Tensor | None) -> bool:
    return gradient is not None and bool(gradient.any())


@torch.no_grad()
def check_bfloat16(plain: Any, folder: Path) -> None:
    """Compare the rounding in bfloat16 with that of transformers."""
    exact_N, _ = unpacked(plain)
    theirs_N, _ = unpacked(AUTO.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager"))
    with torch.enable_grad():
        ours_N, _ = loss_of(folder, samples(), precision="bfloat16")
    assert rms(ours_N - exact_N) <= 2 * rms(theirs_N - exact_N)


def rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())


def unpacked(model: Any) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and entropies of the completions' tokens by transformers' own forward."""
    logprobs, entropies = [], []
    for sample in samples():
        ids = torch.from_numpy(np.concatenate((sample.prompt_ids, sample.completion_ids)).astype(np.int64))
        start = len(sample.prompt_ids)
        logp_TV = (model(ids[None]).logits[0, start - 1 : -1] / TEMPERATURE).log_softmax(-1)
        logprobs.append(logp_TV.gather(-1, ids[start:, None])[:, 0])
        entropies.append(-(logp_TV.exp() * logp_TV).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@torch.no_grad()
def check_export(plain: Any, folder: Path) -> None:
    """Compare the exported model, loaded by transformers, with the model that was loaded for training."""
    policy = load_policy(make_spec(folder).policy, CPU)
    exported = export_pretrained(folder / "export", gather_weights(policy, None), model_name=str(folder))
    loaded = AUTO.from_pretrained(exported, dtype=torch.float32, attn_implementation="eager")
    ids = torch.arange(12)[None]
    assert torch.equal(loaded(ids).logits, plain(ids).logits)
