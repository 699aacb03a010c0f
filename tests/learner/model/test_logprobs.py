"""Chunked log-probabilities against log_softmax of the full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.learner.model.logprobs import chunked_logprobs


def full(hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logp_NV = ((hidden_NH @ weight_VH.T) / temperature).log_softmax(-1)
    return logp_NV.gather(-1, targets_N[:, None])[:, 0], -(logp_NV.exp() * logp_NV).sum(-1)


@pytest.fixture
def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(13, 6, generator=generator, requires_grad=True)
    weight_VH = torch.randn(11, 6, generator=generator, requires_grad=True)
    return hidden_NH, weight_VH, torch.randint(0, 11, (13,), generator=generator)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_value_and_gradient(inputs: tuple[Tensor, Tensor, Tensor], chunk_tokens: int, temperature: float) -> None:
    hidden_NH, weight_VH, targets_N = inputs
    weights_N = torch.linspace(-1, 2, 13)
    expected_N, expected_entropy_N = full(hidden_NH, weight_VH, targets_N, temperature)
    expected_grads = torch.autograd.grad((expected_N * weights_N).sum(), (hidden_NH, weight_VH))
    logprobs_N, entropy_N = chunked_logprobs(*inputs, temperature=temperature, chunk_tokens=chunk_tokens)
    grads = torch.autograd.grad((logprobs_N * weights_N).sum(), (hidden_NH, weight_VH))
    torch.testing.assert_close(logprobs_N, expected_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N, expected_entropy_N.detach(), atol=1e-5, rtol=1e-5)
    for got, expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert not entropy_N.requires_grad


def test_uniform_logits_by_hand() -> None:
    logprobs_N, entropy_N = chunked_logprobs(
        torch.zeros(2, 3), torch.ones(4, 3), torch.tensor([0, 3]), temperature=1.0, chunk_tokens=8
    )
    torch.testing.assert_close(logprobs_N, torch.full((2,), 4.0).log().neg())
    torch.testing.assert_close(entropy_N, torch.full((2,), 4.0).log())


def test_a_certain_token_has_no_entropy() -> None:
    weight_VH = torch.tensor([[1000.0], [0.0]])
    logprobs_N, entropy_N = chunked_logprobs(
        torch.ones(1, 1), weight_VH, torch.tensor([0]), temperature=1.0, chunk_tokens=8
    )
    assert logprobs_N.item() == 0
    assert entropy_N.item() == 0


def test_bfloat16_inputs_give_float32_results(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden_NH, weight_VH = (x.detach().bfloat16().requires_grad_() for x in inputs[:2])
    expected_N, _ = full(hidden_NH.float(), weight_VH.float(), inputs[2], 1.0)
    logprobs_N, _ = chunked_logprobs(hidden_NH, weight_VH, inputs[2], temperature=1.0, chunk_tokens=5)
    assert logprobs_N.dtype == torch.float32
    torch.testing.assert_close(logprobs_N, expected_N, atol=0.05, rtol=0.02)
    grads = torch.autograd.grad(logprobs_N.sum(), (hidden_NH, weight_VH))
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.bfloat16]


def test_no_tokens(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    hidden_NH, weight_VH, targets_N = inputs
    logprobs_N, _ = chunked_logprobs(hidden_NH[:0], weight_VH, targets_N[:0], temperature=1.0, chunk_tokens=5)
    (grad_VH,) = torch.autograd.grad(logprobs_N.sum(), weight_VH)
    assert logprobs_N.shape == (0,)
    assert grad_VH.abs().sum() == 0


def test_without_entropy_the_log_probabilities_are_the_same(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    with_N, _ = chunked_logprobs(*inputs, temperature=1.0, chunk_tokens=5)
    without_N, zeros_N = chunked_logprobs(*inputs, temperature=1.0, chunk_tokens=5, with_entropy=False)
    assert torch.equal(with_N, without_N)
    assert zeros_N.abs().sum() == 0


@pytest.mark.parametrize("chunk_tokens", [2, 100])
def test_gradient_of_the_entropy(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden_NH = torch.randn(5, 4, generator=generator, requires_grad=True)
    weight_VH = torch.randn(7, 4, generator=generator, requires_grad=True)
    targets_N = torch.tensor([0, 3, 6, 2, 2])
    weights_N = torch.linspace(-1, 2, 5)
    logp_NV = (hidden_NH @ weight_VH.T / 0.7).log_softmax(-1)
    chosen_N = logp_NV.gather(-1, targets_N[:, None])[:, 0]
    expected = chosen_N.sum() + (weights_N * -(logp_NV.exp() * logp_NV).sum(-1)).sum()
    logprobs_N, entropy_N = chunked_logprobs(
        hidden_NH, weight_VH, targets_N, temperature=0.7, chunk_tokens=chunk_tokens, entropy_gradient=True
    )
    got = logprobs_N.sum() + (weights_N * entropy_N).sum()
    for a, b in zip(
        torch.autograd.grad(got, (hidden_NH, weight_VH)),
        torch.autograd.grad(expected, (hidden_NH, weight_VH)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("vocabulary_tile", [1, 4, 11])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_tiles_of_the_vocabulary_add_up(
    inputs: tuple[Tensor, Tensor, Tensor], vocabulary_tile: int, entropy_gradient: bool
) -> None:
    hidden_NH, weight_VH, _ = inputs
    slopes_N = torch.linspace(-1, 2, 13)
    expected_N, expected_entropy_N = full(*inputs, temperature=0.6)
    expected = (expected_N * slopes_N).sum() + (expected_entropy_N.sum() if entropy_gradient else 0)
    logprobs_N, entropy_N = chunked_logprobs(
        *inputs,
        temperature=0.6,
        chunk_tokens=5,
        vocabulary_tile=vocabulary_tile,
        entropy_gradient=entropy_gradient,
    )
    got = (logprobs_N * slopes_N).sum() + (entropy_N.sum() if entropy_gradient else 0)
    torch.testing.assert_close(logprobs_N, expected_N, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_N, expected_entropy_N, atol=1e-5, rtol=1e-5)
    for a, b in zip(
        torch.autograd.grad(got, (hidden_NH, weight_VH)),
        torch.autograd.grad(expected, (hidden_NH, weight_VH)),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_large_logits_and_those_of_minus_infinity_keep_their_digits() -> None:
    """Tiles in which the largest logit grows, stays, and is minus infinity."""
    logits_V = torch.tensor([900.0, 899.0, -torch.inf, -torch.inf, 1000.0, 999.5, 0.0, 1000.0])
    logprobs_N, entropy_N = chunked_logprobs(
        torch.ones(1, 1),
        logits_V[:, None],
        torch.tensor([5]),
        temperature=1.0,
        chunk_tokens=1,
        vocabulary_tile=2,
    )
    logp_V = logits_V.double().log_softmax(-1)
    torch.testing.assert_close(logprobs_N.item(), logp_V[5].item(), atol=1e-6, rtol=0)
    expected = -sum(p.exp() * p for p in logp_V if p.isfinite())
    torch.testing.assert_close(entropy_N.item(), float(expected), atol=1e-6, rtol=0)


def test_a_frozen_head_gets_no_gradient(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """As under an adapter."""
    hidden_NH, weight_VH, targets_N = inputs
    expected_N, _ = full(hidden_NH, weight_VH.detach(), targets_N, 1.0)
    logprobs_N, _ = chunked_logprobs(
        hidden_NH, weight_VH.detach(), targets_N, temperature=1.0, chunk_tokens=5, vocabulary_tile=4
    )
    for grad in zip(*(torch.autograd.grad(x.sum(), hidden_NH) for x in (logprobs_N, expected_N)), strict=True):
        torch.testing.assert_close(*grad, atol=1e-5, rtol=1e-5)


def short_inputs(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden_NH, weight_VH = (torch.randn(n, 16, generator=generator).bfloat16() for n in (num_tokens, 40))
    return hidden_NH, weight_VH.requires_grad_(), torch.randint(0, 40, (num_tokens,), generator=generator)


def test_a_bfloat16_heads_gradient_is_summed_in_float32() -> None:
    """The error does not grow with the number of chunks, as it would if each were added to a bfloat16 sum."""
    hidden_NH, weight_VH, targets_N = short_inputs(512)
    expected_N, _ = full(hidden_NH.double(), weight_VH.double(), targets_N, 1.0)
    (expected_VH,) = torch.autograd.grad(expected_N.sum(), weight_VH)

    def error(chunk_tokens: int) -> float:
        logprobs_N, _ = chunked_logprobs(
            hidden_NH, weight_VH, targets_N, temperature=1.0, chunk_tokens=chunk_tokens, float32_head=True
        )
        (grad_VH,) = torch.autograd.grad(logprobs_N.sum(), weight_VH)
        return float((grad_VH - expected_VH).norm() / expected_VH.norm())

    assert error(8) == pytest.approx(error(512), rel=0.05)
    assert error(8) < 0.004


def test_a_float32_head_does_not_round_its_logits() -> None:
    hidden_NH, weight_VH, targets_N = short_inputs(64)
    expected_N, _ = full(hidden_NH.float(), weight_VH.float(), targets_N, 1.0)
    errors = []
    for float32_head in (True, False):
        logprobs_N, _ = chunked_logprobs(
            hidden_NH, weight_VH, targets_N, temperature=1.0, chunk_tokens=7, float32_head=float32_head
        )
        errors.append(float((logprobs_N - expected_N).detach().abs().max()))
    assert errors[0] < 1e-5 < 1e-3 < errors[1]


class LargestTensor(TorchDispatchMode):
    """Records the most elements that one operation has returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_tensor_grows_with_tokens_times_vocabulary() -> None:
    found = []
    for num_tokens, vocabulary in ((64, 64), (256, 256)):
        hidden_NH, weight_VH = torch.randn(num_tokens, 2), torch.randn(vocabulary, 2, requires_grad=True)
        with LargestTensor() as largest:
            logprobs_N, entropy_N = chunked_logprobs(
                hidden_NH,
                weight_VH,
                torch.zeros(num_tokens, dtype=torch.int64),
                temperature=1.0,
                chunk_tokens=32,
                vocabulary_tile=32,
                entropy_gradient=True,
            )
            (logprobs_N.sum() + entropy_N.sum()).backward()
        found.append(largest.elements)
    assert found == [32 * 32, 32 * 32]
