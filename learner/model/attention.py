"""Attention over a packed row: many sequences laid end to end in one tensor.

Promise: no token attends across a sequence's border, no mask is built for the row, and everything but attention and
layers with states (`paceline.learner.model.mixers`) runs on exactly the real tokens. The implementation is registered with transformers as `paceline_packed`. Each call gets
the row's layout as the keyword argument `layout`, which transformers passes to every layer (also to a recomputed one).

There are two paths. CUDA in bfloat16 or float16 uses `torch.nn.attention.varlen` (flash attention, one kernel for the
row; FlashAttention-3 on a Hopper GPU if its package is installed). Otherwise, runs of sequences of equal length are
views [n, H, L, D] of the row, and each run is one call of scaled_dot_product_attention with is_causal. Packing puts
equal lengths side by side, so this needs neither padding nor gathering; on a CPU, one more SDPA call costs 0.02 ms
forward and 0.07 ms with backward, less than copies of q, k and v. Attention sinks and soft caps always take the second path: flash
attention's log-sum-exp has no gradient, and it has no cap.

If a row has shared prompts, flash attention reads copies of keys and values: each completion gets a copy of its
prompt's before its own. The other kernels of CUDA also read copies of the queries. A CPU copies nothing
(`paceline.learner.model.shared_attention`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from paceline.learner.batch.samples import SequenceLayout
from paceline.learner.model.determinism import repeat_backward
from paceline.learner.model.shared_attention import band, shared_attention
from paceline.models.architectures import MIXERS

IMPLEMENTATION = "paceline_packed"
HOPPER = (9, 0)
"""Compute capability that FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608) has kernels for."""
log = logging.getLogger(__name__)
UNSUPPORTED_ARGUMENTS = ("position_bias", "sinks", "indices")
"""Arguments that some architectures pass to attention and that neither path supports."""


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: SequenceLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return ([1, T, H, D], None): causal attention within each sequence of a packed row, with the signature that
    transformers requires. Dropout is not applied, because a policy's log-probabilities must be those of the sampler.

    Args:
        query: [1, H, T, D].
        key: [1, K, T, D], K dividing H (grouped queries).
        value: [1, K, T, E]; E is another width than D in latent attention (DeepSeek-V2, arXiv 2405.04434).
        sliding_window: number of tokens that a token attends to, itself included; None: all before it.
        s_aux: [H] attention sinks, the logits of a key without a value that every token attends to.
        softcap: cap of cap · tanh(score / cap) (Gemma 2, arXiv 2408.00118); None: no cap.
    """
    _Calls.number += 1
    if layout is None or attention_mask is not None:
        lack = "does not pass the layout of a packed row on" if layout is None else "needs a mask that its model builds"
        raise NotImplementedError(f"{type(module).__name__} {lack}; name a model of another type")
    for name in UNSUPPORTED_ARGUMENTS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} needs {name!r}, which packed attention does not support"
            )
    width, scaling = value.shape[-1], query.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = _of_one_width(query, key, value)
    chunk = _chunk_tokens(module)
    if chunk is not None and chunk < layout.max_length:
        own = None
        if layout.shared:
            own, tokens = layout.unshared.own, layout.unshared.tokens
            query, key, value = (x.index_select(2, tokens) for x in (query, key, value))
            layout = layout.unshared.layout
        out = _attend(query, key, value, _in_chunks(layout, chunk), scaling, sliding_window, s_aux, softcap)
        out = out if own is None else out.index_select(1, own)
    else:
        out = _attend(query, key, value, layout, scaling, sliding_window, s_aux, softcap)
    return out[..., :width], None


class _Calls:
    number = 0
    """Number of calls of `packed_attention` in this process."""


@contextlib.contextmanager
def requires_packed(model: Any) -> Iterator[None]:
    """Raise NotImplementedError if the passes of a model within the `with` block never attend by `packed_attention`:
    some models have their own attention, which would attend over the borders of sequences."""
    before = _Calls.number
    yield
    if _Calls.number == before and model.config.get_text_config().model_type not in MIXERS:
        raise NotImplementedError(
            f"the attention of a {type(model).__name__} cannot be replaced, so sequences of a packed row would attend to each "
            "other; name a model of another type"
        )


def _of_one_width(*arrays: Tensor) -> list[Tensor]:
    """Return queries, keys and values, padded with zeros to the same width, because kernels need one width. The zeros
    change no score and no kept value."""
    width = max(x.shape[-1] for x in arrays)
    return [x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1])) for x in arrays]


def _chunk_tokens(module: Any) -> int | None:
    """Return the tokens of a chunk (in Llama 4 no token attends beyond its chunk); None if the layer has no chunks."""
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    if not kinds or kinds[module.layer_idx] != "chunked_attention":
        return None
    return int(module.config.attention_chunk_size)


def _in_chunks(layout: SequenceLayout, chunk: int) -> SequenceLayout:
    """Return the layout whose sequences are the chunks of the sequences of `layout`, which must share no prompt."""
    lengths = [length for count, length in layout.runs for _ in range(count)]
    parts = [min(chunk, length - begin) for length in lengths for begin in range(0, length, chunk)]
    return SequenceLayout.of(parts, layout.starts.device)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    scale: float,
    sliding_window: int | None,
    sinks_H: Tensor | None,
    cap: float | None,
) -> Tensor:
    window = None if sliding_window is None or sliding_window >= layout.max_length else sliding_window
    if sinks_H is None and cap is None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _flash(q, k, v, layout, scale, window)
    if layout.shared and not q.is_cuda and cap is None:
        return shared_attention(q, k, v, layout, scale, window, sinks_H).unsqueeze(0)
    return _by_runs(q, k, v, layout, scale, window, sinks_H, cap)


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: SequenceLayout, scale: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1]} if _flash_asks_for_gqa() else {}
    q_THD, k_UKD, v_UKD = (x[0].transpose(0, 1) for x in (q, k, v))
    starts = layout.starts
    if layout.shared:  # flash attention is causal from the last query and the last key of each span backwards
        k_UKD, v_UKD = (x.index_select(0, layout.unshared.tokens) for x in (k_UKD, v_UKD))
        starts = layout.unshared.layout.starts
    out_THD = varlen_attn(
        q_THD,
        k_UKD,
        v_UKD,
        layout.starts,
        starts,
        layout.max_length,
        layout.max_length,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **grouped,
    )
    assert isinstance(out_THD, Tensor)
    return repeat_backward(out_THD).unsqueeze(0)


def prefer_flash_attention_3(device: torch.device, *, deterministic: bool = False) -> bool:
    """Switch PyTorch's flash attention to FlashAttention-3 if the package `flash_attn_interface` is installed and the
    GPU has its kernels; return whether it did. FlashAttention-2 stays on releases of PyTorch that cannot switch. It
    also stays in deterministic runs, because FlashAttention-3's gradients differ between runs even with its option for
    this (Dao-AILab/flash-attention#2244)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return False
    try:
        from torch.nn import attention

        if deterministic:
            if attention.current_flash_attention_impl() == "FA3":
                attention.restore_flash_attention_impl()
            return False
        if attention.current_flash_attention_impl() != "FA3":
            attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, RuntimeError, ValueError) as error:
        log.info("attention runs with FlashAttention-2: %s", error)
        return False
    log.info("attention runs with FlashAttention-3")
    return True


@functools.cache
def _flash_asks_for_gqa() -> bool:
    """Return whether flash attention needs an argument for grouped queries, as newer releases of PyTorch do."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _by_runs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SequenceLayout,
    scale: float | None,
    window: int | None,
    sinks_H: Tensor | None,
    cap: float | None = None,
) -> Tensor:
    if layout.shared:  # each completion gets a copy of its prompt before it
        whole = layout.unshared
        q, k, v = (x.index_select(2, whole.tokens) for x in (q, k, v))
        return _by_runs(q, k, v, whole.layout, scale, window, sinks_H, cap).index_select(1, whole.own)
    if q.is_cuda and q.shape[1] != k.shape[1]:
        # CUDA's float32 kernel does not support grouped queries; without this SDPA falls back to materialised scores.
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    run_tokens = [count * length for count, length in layout.runs]
    q_runs, k_runs, v_runs = (torch.split(x[0].transpose(0, 1), run_tokens) for x in (q, k, v))
    outs_THD = []
    for (count, length), q_THD, k_THD, v_THD in zip(layout.runs, q_runs, k_runs, v_runs, strict=True):
        q_nHLD, k_nKLD, v_nKLD = (x.reshape(count, length, *x.shape[1:]).transpose(1, 2) for x in (q_THD, k_THD, v_THD))
        mask_LL = None if window is None or length <= window else band(length, window, q.device)
        if sinks_H is not None:
            k_nKLD, v_nKLD = (pad(x, (0, 0, 0, 1)) for x in (k_nKLD, v_nKLD))
            mask_LL = _with_sinks(mask_LL, length, sinks_H.to(q.dtype))
        if cap is not None:
            mask_LL = band(length, length, q.device) if mask_LL is None else mask_LL
            out_nHLD = _capped(q_nHLD, k_nKLD, v_nKLD, mask_LL, scale, cap)
        else:
            out_nHLD = scaled_dot_product_attention(
                q_nHLD,
                k_nKLD,
                v_nKLD,
                attn_mask=mask_LL,
                is_causal=mask_LL is None,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        outs_THD.append(repeat_backward(out_nHLD).transpose(1, 2).reshape(count * length, q.shape[1], -1))
    return torch.cat(outs_THD).unsqueeze(0)


def _with_sinks(mask_LL: Tensor | None, length: int, sinks_H: Tensor) -> Tensor:
    """Return a bias [1, H, L, L + 1] for scores whose last key is all zeros: the sinks in the last column; in the other
    columns 0 if the token attends and -inf if not. A zero key has the score 0, so its biased score is the sink's logit;
    its value is zero too. Scores take L · L numbers for each head."""
    if mask_LL is None:
        mask_LL = band(length, length, sinks_H.device)
    shape = (1, len(sinks_H), length)
    added_LL = sinks_H.new_zeros(length, length).masked_fill(~mask_LL, -torch.inf)
    return torch.cat((added_LL.expand(*shape, -1), sinks_H[None, :, None, None].expand(*shape, 1)), dim=-1)


def _capped(q: Tensor, k: Tensor, v: Tensor, mask_LL: Tensor, scale: float | None, cap: float) -> Tensor:
    """Return [n, H, L, D]: attention with soft-capped scores. `mask_LL` are booleans, or numbers that are added."""
    assert scale is not None
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.transpose(2, 3) * (scale / cap)).tanh() * cap
    scores = scores.masked_fill(~mask_LL, -torch.inf) if mask_LL.dtype == torch.bool else scores + mask_LL
    return scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(v.dtype) @ v


# transformers builds no mask for an implementation that AttentionMaskInterface does not have, so none is registered.
AttentionInterface.register(IMPLEMENTATION, packed_attention)


def leave_out_of_graphs() -> None:
    """Exclude attention from torch.compile, which would compile it again for each new row."""
    left_out: Any = torch.compiler.disable
    AttentionInterface.register(IMPLEMENTATION, left_out(packed_attention))
