"""Log-probabilities of given tokens from hidden states and the LM head, without the full logits.

Promise: logits exist for one tile of at most `chunk_tokens` tokens by `VOCABULARY_TILE` tokens of the vocabulary, in
the forward and in the backward pass, so the memory of logits depends neither on the number of tokens nor on the
vocabulary. The values are those of log_softmax over float32 logits, and the sums over tiles are kept in float32.
Suffixes: N tokens, H hidden size, V vocabulary; a tile has M tokens and W of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

VOCABULARY_TILE = 16_384
"""Number of tokens of the vocabulary whose logits exist at the same time: 64 MiB in float32 with 1,024 tokens."""
MIN_LOGPROB = -1e4
"""Floor of log p in products with p. Its exp is 0, so the product is exact, even for a logit of minus infinity."""


def chunked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = True,
    entropy_gradient: bool = False,
    float32_head: bool = False,
    vocabulary_tile: int = VOCABULARY_TILE,
    bias_V: Tensor | None = None,
    scale: float = 1.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(z / temperature)[target], and the entropy of that distribution, for the logits
    z = scale · (h·Wᵀ + bias), or cap · tanh(z / cap) of these (Gemma 2, arXiv 2408.00118).

    Args:
        hidden_NH: [N, H] last hidden states at the positions that predict the targets.
        weight_VH: [V, H] LM head; a plain tensor (under FSDP: call inside the wrapped forward).
        targets_N: [N] int64.
        temperature: the sampler's, > 0.
        chunk_tokens: tokens of a tile.
        with_entropy: False returns zeros instead, and saves a pass over the logits.
        entropy_gradient: entropy_N has a gradient too (for an entropy bonus); needs with_entropy.
        float32_head: compute products with the head's weights in float32 and keep the products in float32; False: round
            the products to the type of the inputs, as the model's own head does.
        vocabulary_tile: tokens of the vocabulary in a tile.
        bias_V: [V] bias of the head.

    Returns:
        (logprobs_N with gradient, entropy_N with gradient only if entropy_gradient), float32, in nats.
    """
    form = _LogitForm(scale / temperature, None if cap is None else cap / temperature, float32_head)
    settings = form, chunk_tokens, vocabulary_tile, with_entropy, entropy_gradient
    return _ChunkedLogprobs.apply(hidden_NH, weight_VH, bias_V, targets_N, *settings)  # type: ignore[no-any-return, no-untyped-call]


class _LogitForm(NamedTuple):
    """Form of the logits, the division by the temperature included."""

    scale: float
    cap: float | None
    float32_head: bool

    def logits(self, hidden_MH: Tensor, head_WH: Tensor, bias_W: Tensor | None) -> Tensor:
        """Return [M, W] float32 logits."""
        if self.float32_head:
            product_MW = _float32_product(_operand(hidden_MH, True), head_WH.T)
        else:
            product_MW = (hidden_MH @ head_WH.T).float()
        if bias_W is not None:
            product_MW.add_(bias_W.float())
        logits_MW = product_MW.mul_(self.scale)
        return logits_MW if self.cap is None else logits_MW.div_(self.cap).tanh_().mul_(self.cap)

    def slopes(self, logits_MW: Tensor) -> Tensor | None:
        """Return [M, W] the derivative of the soft cap at the logits; None without a cap."""
        return None if self.cap is None else (logits_MW / self.cap).square_().neg_().add_(1.0)


class _ChunkedLogprobs(torch.autograd.Function):
    """Recomputes each tile's logits in the backward pass from the saved hidden states.

    With logits z = h·Wᵀ/τ, p = softmax(z) and entropy H: ∂ log p[t] / ∂z = onehot(t) − p, ∂H / ∂z = −p·(log p + H). The
    outer loop is over the vocabulary, so that a tile's gradient of W is complete after the inner loop. Its float32 sum
    then needs only the memory of one tile's weights; the sum for the hidden states' gradient needs N·H numbers.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        form: _LogitForm,
        chunk_tokens: int,
        vocabulary_tile: int,
        with_entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.form, ctx.chunk_tokens, ctx.vocabulary_tile = form, chunk_tokens, vocabulary_tile
        ctx.entropy_gradient = entropy_gradient
        sums = _OnlineSoftmax(targets_N, hidden_NH.device, with_entropy)
        add = sums.add if len(weight_VH) > vocabulary_tile else sums.set
        for vocabulary, weight_WH in _tiles_of(weight_VH, vocabulary_tile):
            head_WH = _operand(weight_WH, form.float32_head)
            bias_W = None if bias_V is None else bias_V[vocabulary]
            for chunk in _slices(len(targets_N), chunk_tokens):
                add(chunk, vocabulary, form.logits(hidden_NH[chunk], head_WH, bias_W))
        logprobs_N, log_z_N, entropy_N = sums.result()
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, targets_N, log_z_N, entropy_N)
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, targets_N, log_z_N, entropy_N = ctx.saved_tensors
        form: _LogitForm = ctx.form
        grad_N = grads[0].float() * form.scale
        entropy_grad_N = grads[1].float() * form.scale if ctx.entropy_gradient else None
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.zeros_like(hidden_NH, dtype=torch.float32) if wants_hidden else None
        grad_weight_VH = torch.empty_like(weight_VH) if wants_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if bias_V is not None and wants_bias else None
        for vocabulary, weight_WH in _tiles_of(weight_VH, ctx.vocabulary_tile):
            head_WH = _operand(weight_WH, form.float32_head)
            bias_W = None if bias_V is None else bias_V[vocabulary]
            grad_WH = torch.zeros_like(weight_WH, dtype=torch.float32) if wants_weight else None
            for chunk in _slices(len(targets_N), ctx.chunk_tokens):
                logits_MW = form.logits(hidden_NH[chunk], head_WH, bias_W)
                through_cap_MW = form.slopes(logits_MW)
                entropy_M = None if entropy_grad_N is None else (entropy_N[chunk], entropy_grad_N[chunk])
                slope_MW = _slopes(logits_MW.sub_(log_z_N[chunk, None]), grad_N[chunk], entropy_M)
                _add_at_targets(slope_MW, targets_N[chunk] - vocabulary.start, grad_N[chunk])
                if through_cap_MW is not None:
                    slope_MW.mul_(through_cap_MW)
                if grad_bias_V is not None:
                    grad_bias_V[vocabulary] += slope_MW.sum(0)
                slope_MW = slope_MW if form.float32_head else slope_MW.to(weight_VH.dtype)
                if grad_hidden_NH is not None:
                    _add_product(grad_hidden_NH[chunk], slope_MW, head_WH)
                if grad_WH is not None:
                    _add_product(grad_WH, slope_MW.T, _operand(hidden_NH[chunk], form.float32_head))
            if grad_weight_VH is not None and grad_WH is not None:
                grad_weight_VH[vocabulary] = grad_WH
        grad_hidden_NH = None if grad_hidden_NH is None else grad_hidden_NH.to(hidden_NH.dtype)
        grad_bias_V = None if grad_bias_V is None or bias_V is None else grad_bias_V.to(bias_V.dtype)
        return (grad_hidden_NH, grad_weight_VH, grad_bias_V, *[None] * 6)


class _OnlineSoftmax:
    """Sums over the vocabulary, tile by tile. With d = z − max z they are Σ exp(d) and Σ exp(d)·d, from which H = log Σ
    exp(d) − Σ exp(d)·d / Σ exp(d). Both are relative to the largest logit so far, so large logits lose no digits."""

    def __init__(self, targets_N: Tensor, device: torch.device, with_entropy: bool) -> None:
        def zeros() -> Tensor:
            return torch.zeros(len(targets_N), dtype=torch.float32, device=device)

        self._targets_N, self._with_entropy = targets_N, with_entropy
        self._target_logits_N, self._sum_N, self._weighted_N = zeros(), zeros(), zeros()
        self._max_N = zeros().fill_(torch.finfo().min)
        self._whole: tuple[Tensor, Tensor, Tensor] | None = None

    def add(self, chunk: slice, vocabulary: slice, logits_MW: Tensor) -> None:
        """Add the logits of one tile, and overwrite them."""
        _keep_targets(self._target_logits_N[chunk], logits_MW, self._targets_N[chunk] - vocabulary.start)
        old_M = self._max_N[chunk]
        max_M = torch.maximum(old_M, logits_MW.amax(-1))
        lowered_M = (old_M - max_M).clamp_(min=MIN_LOGPROB)
        scale_M = lowered_M.exp()
        below_MW = logits_MW.sub_(max_M[:, None])
        if self._with_entropy:
            below_MW.clamp_(min=MIN_LOGPROB)
            exp_MW = below_MW.exp()
            before_M = self._weighted_N[chunk] + self._sum_N[chunk] * lowered_M
            self._weighted_N[chunk] = before_M * scale_M + below_MW.mul_(exp_MW).sum(-1)
        else:
            exp_MW = below_MW.exp_()
        self._sum_N[chunk] = self._sum_N[chunk] * scale_M + exp_MW.sum(-1)
        self._max_N[chunk] = max_M

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (log p of the targets, log Σ exp(z), entropy or zeros); log p is computed from differences of logits,
        because these are exact."""
        if self._whole is not None:
            return self._whole
        log_sum_N = self._sum_N.log()
        entropy_N = log_sum_N - self._weighted_N / self._sum_N if self._with_entropy else self._weighted_N
        return (self._target_logits_N - self._max_N) - log_sum_N, self._max_N + log_sum_N, entropy_N

    def set(self, chunk: slice, vocabulary: slice, logits_MW: Tensor) -> None:
        """Set the results of a chunk whose only tile is the whole vocabulary, overwriting its logits. The sums are
        computed as in recorded runs, which therefore train again bit for bit."""
        if self._whole is None:
            self._whole = (self._target_logits_N, self._max_N, self._weighted_N)
        logprobs_N, log_z_N, entropy_N = self._whole
        log_z_N[chunk] = logits_MW.logsumexp(-1)
        logprobs_N[chunk] = logits_MW.gather(-1, self._targets_N[chunk, None])[:, 0] - log_z_N[chunk]
        if self._with_entropy:
            logp_MW = logits_MW.sub_(log_z_N[chunk, None])
            entropy_N[chunk] = -(logp_MW.exp() * logp_MW.clamp_(min=torch.finfo().min)).sum(-1)


def _slopes(logp_MW: Tensor, grad_M: Tensor, entropy_M: tuple[Tensor, Tensor] | None) -> Tensor:
    """Return the loss's gradient with respect to the logits, without the part at the targets; `logp_MW` is overwritten.
    `entropy_M`: entropies and their gradients, if they have any."""
    if entropy_M is None:
        return logp_MW.exp_().mul_(-grad_M[:, None])
    values_M, slopes_M = entropy_M
    surprise_MW = logp_MW.clamp(min=MIN_LOGPROB).add_(values_M[:, None])
    surprise_MW.mul_(slopes_M[:, None]).add_(grad_M[:, None])
    return logp_MW.exp_().mul_(surprise_MW.neg_())


def _keep_targets(kept_M: Tensor, logits_MW: Tensor, columns_M: Tensor) -> None:
    """Write the logits at the targets' columns to `kept_M`, for the targets in this tile."""
    has_M = (columns_M >= 0) & (columns_M < logits_MW.shape[1])
    columns_M = columns_M.clamp(0, logits_MW.shape[1] - 1)
    kept_M.copy_(torch.where(has_M, logits_MW.gather(-1, columns_M[:, None])[:, 0], kept_M))


def _add_at_targets(slope_MW: Tensor, columns_M: Tensor, grad_M: Tensor) -> None:
    has_M = (columns_M >= 0) & (columns_M < slope_MW.shape[1])
    columns_M = columns_M.clamp(0, slope_MW.shape[1] - 1)
    slope_MW.scatter_add_(-1, columns_M[:, None], (grad_M * has_M)[:, None])


def _operand(tensor: Tensor, float32_head: bool) -> Tensor:
    """Return the tensor in the type that the products take; CUDA's products take 16-bit types and sum in float32."""
    return tensor.float() if float32_head and not tensor.is_cuda else tensor


def _float32_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left·right, summed in and rounded to float32, whatever the operands' types are."""
    if left.is_cuda and left.dtype == right.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _add_product(sum_: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left·right to the float32 `sum_` without rounding the product to a shorter type."""
    if left.dtype == right.dtype == torch.float32:
        sum_.addmm_(left, right)
    else:
        sum_.add_(_float32_product(left, right))


def _tiles_of(weight_VH: Tensor, size: int) -> Iterator[tuple[slice, Tensor]]:
    for vocabulary in _slices(len(weight_VH), size):
        yield vocabulary, weight_VH[vocabulary]


def _slices(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]
