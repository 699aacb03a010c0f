"""Attention on a CPU over rows whose sequences share prompts: a prompt's keys are read in place, for all completions.

A span of the row is a prompt, one completion's tokens behind it, or a sequence that shares nothing. Each span attends
to itself, and a completion attends to its prompt too. Softmax over the union of two sets of keys is a mean of the two
results, weighted by their sums of exponentials (Milakov and Gimelshein 2018, arXiv 1805.02867), so each product takes
views of the row: nothing is copied, and no masked score is computed. In the backward pass a probability is exp(score -
log-sum-exp), and the mean that softmax's gradient subtracts follows from the result (Dao et al. 2022, arXiv 2205.14135,
appendix B.2). So a kernel that gets result and log-sum-exp of the union returns each set's exact part of the gradients.

Suffixes: T tokens of the row, H heads of the queries, K heads of the keys, D width of a head; n spans of equal length L.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.learner.batch.samples import SequenceLayout, SharedPrompt

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def shared_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    scale: float | None = None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Return [T, H, D]: causal attention of each sequence of the row, with the arguments of `packed_attention`."""
    result: Tensor = _SharedAttention.apply(q, k, v, sinks_H, layout, scale, window)  # type: ignore[no-untyped-call]
    return result


class _Part(NamedTuple):
    """One call of the kernel: neighbouring spans of queries, each with its keys."""

    queries: slice
    keys: slice
    spans: int
    """Number of the spans."""
    mask: Tensor | None = None
    """[queries, keys] numbers that are added to the scores."""
    is_prompt: bool = False
    """True if the spans attend to a shared prompt, False if each span attends to itself."""

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return views [n, H or K, L, D] of arrays [1, H or K, T, D]."""
        return self.asked(q), self._view(k, self.keys), self._view(v, self.keys)

    def asked(self, x: Tensor) -> Tensor:
        return self._view(x, self.queries)

    def _view(self, x: Tensor, span: slice) -> Tensor:
        return x[0, :, span].view(x.shape[1], self.spans, -1, x.shape[3]).transpose(0, 1)


class _SharedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks_H: Tensor | None,
        layout: SequenceLayout,
        scale: float | None,
        window: int | None,
    ) -> Tensor:
        out_THD = q.new_empty(q.shape[2], q.shape[1], q.shape[3])
        out = out_THD.transpose(0, 1)[None]
        lse_HT = q.new_empty(q.shape[1:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for part in _parts(layout, window, q):
            result, lse = _forward(
                *part.of(q, k, v), is_causal=part.mask is None and not part.is_prompt, attn_mask=part.mask, scale=scale
            )
            of_part = part.asked(lse_HT[None, ..., None])[..., 0]
            if part.mask is not None:  # the kernel's result without any key is 0, but its log-sum-exp is not -inf
                lse = lse + part.mask.amax(-1)
            if part.is_prompt:
                _merge(part.asked(out), of_part, result, lse)
            else:
                part.asked(out).copy_(result)
                of_part.copy_(lse)
        if sinks_H is not None:
            own_HT, lse_HT = lse_HT, torch.logaddexp(lse_HT, sinks_H[:, None].to(lse_HT.dtype))
            out_THD *= (own_HT - lse_HT).exp().T[..., None]
        ctx.save_for_backward(q, k, v, sinks_H, out_THD, lse_HT)
        ctx.layout, ctx.window, ctx.scale = layout, window, scale  # the masks are made again, because they are large
        return out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks_H, out_THD, lse_HT = ctx.saved_tensors
        (grad_THD,) = grads
        grad, out = (x.transpose(0, 1)[None] for x in (grad_THD, out_THD))
        arrays = [torch.empty_like(x.transpose(1, 2)).transpose(1, 2) for x in (q, k, v)]
        for part in _parts(ctx.layout, ctx.window, q):
            of_part = _backward(
                part.asked(grad),
                *part.of(q, k, v),
                part.asked(out),
                part.asked(lse_HT[None, ..., None])[..., 0],
                0.0,
                part.mask is None and not part.is_prompt,
                attn_mask=part.mask,
                scale=ctx.scale,
            )
            for total, share in zip(part.of(*arrays), of_part, strict=True):
                total.add_(share) if part.is_prompt else total.copy_(share)
        grad_sinks_H = None
        if sinks_H is not None:
            share_HT = (sinks_H[:, None].to(lse_HT.dtype) - lse_HT).exp()
            grad_sinks_H = -(share_HT * (grad_THD * out_THD).sum(-1).T).sum(1).to(sinks_H.dtype)
        return (*arrays, grad_sinks_H, None, None, None)


def _merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> None:
    """Replace a result and its log-sum-exp by those of the union of both sets of keys."""
    out.lerp_(other, (other_lse - lse).sigmoid()[..., None].to(out.dtype))
    torch.logaddexp(lse, other_lse, out=lse)


def _parts(layout: SequenceLayout, window: int | None, like: Tensor) -> Iterator[_Part]:
    begin = 0
    for count, length in layout.runs:
        span = slice(begin, begin := begin + count * length)
        masked = window is not None and length > window
        mask = _added(band(length, window, like.device), like) if masked and window is not None else None
        yield _Part(span, span, count, mask)
    for prompt in layout.shared:
        first = 0 if window is None else max(prompt.length + 1 - window, 0)
        if first < prompt.length and prompt.end > prompt.begin + prompt.length:
            after = prompt.begin + prompt.length
            mask = None if window is None else _mask_of_prompt(prompt, first, window, like)
            yield _Part(slice(after, prompt.end), slice(prompt.begin + first, after), 1, mask, is_prompt=True)


def band(length: int, window: int, device: torch.device) -> Tensor:
    """Return [L, L] bool: token i attends to tokens (i - window, i]."""
    ones = torch.ones(length, length, dtype=torch.bool, device=device)
    return ones.tril() & ones.triu(1 - window)


def _mask_of_prompt(prompt: SharedPrompt, first: int, window: int, like: Tensor) -> Tensor | None:
    """Return the mask of the prompt's keys from `first` on, for all tokens behind it; None if all attend to all."""
    if max(prompt.own) + prompt.length - first <= window:
        return None
    positions = torch.cat([torch.arange(own, device=like.device) for own in prompt.own]) + prompt.length
    return _added(positions[:, None] - torch.arange(first, prompt.length, device=like.device) < window, like)


def _added(attends: Tensor, like: Tensor) -> Tensor:
    return like.new_zeros(attends.shape).masked_fill(~attends, -torch.inf)
