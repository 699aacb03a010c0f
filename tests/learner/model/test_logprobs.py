"""Chunked log-probabilities against log_softmax of the full logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from learner.model.logprobs import chunked_logprobs


def full(
    hidden_NH: Tensor, weight_VH: Tensor, targets_N: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
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
def test_value_and_gradient(
    inputs: tuple[Tensor, Tensor, Tensor], chunk_tokens: int, temperature: float
) -> None:
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
