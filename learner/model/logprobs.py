"""Log-probabilities of given tokens from hidden states and the LM head, without the full logits.

Promise: logits exist for `chunk_tokens` tokens at a time, in the forward and in the backward pass; the values are
those of log_softmax over float32 logits.

Suffixes: N tokens, H hidden size, V vocabulary, M tokens of one chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MIN_LOGPROB = -1e4
"""Floor of log p in the entropy's gradient; exp of it is 0, so the product with p is exact."""


def chunked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(h·Wᵀ / temperature)[target], and the entropy of that distribution.

    Args:
        hidden_NH: [N, H] last hidden states at the positions that predict the targets.
        weight_VH: [V, H] LM head; a plain tensor (under FSDP: call inside the wrapped forward).
        targets_N: [N] int64.
        temperature: the sampler's, > 0.
        chunk_tokens: tokens whose logits exist at one time.
        with_entropy: False returns zeros instead, and saves a pass over the logits.
        entropy_gradient: entropy_N has a gradient too (for an entropy bonus); needs with_entropy.

    Returns:
        (logprobs_N with gradient, entropy_N with one only with entropy_gradient), float32, in nats.
    """
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, targets_N, 1.0 / temperature, chunk_tokens, with_entropy, entropy_gradient
    )
    return logprobs_N, entropy_N


class _ChunkedLogprobs(torch.autograd.Function):
    """Recomputes each chunk's logits in the backward pass from the saved hidden states.

    With logits z = h·Wᵀ/τ, p = softmax(z) and entropy H: ∂ log p[t] / ∂z = onehot(t) − p, ∂H / ∂z = −p·(log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        inverse_temperature: float,
        chunk_tokens: int,
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N = torch.empty(len(targets_N), dtype=torch.float32, device=hidden_NH.device)
        log_z_N = torch.empty_like(logprobs_N)
        entropy_N = torch.zeros_like(logprobs_N)
        for chunk in _chunks(len(targets_N), chunk_tokens):
            logits_MV = _logits(hidden_NH[chunk], weight_VH, inverse_temperature)
            log_z_N[chunk] = logits_MV.logsumexp(-1)
            logprobs_N[chunk] = logits_MV.gather(-1, targets_N[chunk, None])[:, 0] - log_z_N[chunk]
            if with_entropy:
                logp_MV = logits_MV.sub_(log_z_N[chunk, None])
                # H = -Σ p·log p; a logit of -inf has p = 0 and adds nothing.
                entropy_N[chunk] = -(logp_MV.exp() * logp_MV.clamp_(min=torch.finfo().min)).sum(-1)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, log_z_N, entropy_N)
        ctx.inverse_temperature, ctx.chunk_tokens = inverse_temperature, chunk_tokens
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, targets_N, log_z_N, entropy_N = ctx.saved_tensors
        grad_N = grads[0].float() * ctx.inverse_temperature
        entropy_grad_N = grads[1].float() * ctx.inverse_temperature if ctx.entropy_gradient else None
        grad_hidden_NH = torch.empty_like(hidden_NH) if ctx.needs_input_grad[0] else None
        grad_weight_VH = torch.zeros_like(weight_VH) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(len(targets_N), ctx.chunk_tokens):
            logits_MV = _logits(hidden_NH[chunk], weight_VH, ctx.inverse_temperature)
            logp_MV = logits_MV.sub_(log_z_N[chunk, None])
            if entropy_grad_N is None:
                slope_MV = logp_MV.exp_().mul_(-grad_N[chunk, None])
            else:
                surprise_MV = logp_MV.clamp(min=MIN_LOGPROB).add_(entropy_N[chunk, None])
                surprise_MV.mul_(entropy_grad_N[chunk, None]).add_(grad_N[chunk, None])
                slope_MV = logp_MV.exp_().mul_(surprise_MV.neg_())
            slope_MV.scatter_add_(-1, targets_N[chunk, None], grad_N[chunk, None])
            slope_MV = slope_MV.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                torch.mm(slope_MV, weight_VH, out=grad_hidden_NH[chunk])
            if grad_weight_VH is not None:
                grad_weight_VH.addmm_(slope_MV.T, hidden_NH[chunk])
        return grad_hidden_NH, grad_weight_VH, None, None, None, None, None


def _logits(hidden_MH: Tensor, weight_VH: Tensor, inverse_temperature: float) -> Tensor:
    return (hidden_MH @ weight_VH.T).float().mul_(inverse_temperature)


def _chunks(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]
