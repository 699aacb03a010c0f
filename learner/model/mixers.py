"""Layers that carry a state from token to token (linear attention, state spaces, short convolutions) over a packed row.

Promise: no state crosses the border of a sequence. Everything else of the model runs over the whole row; only these
mixers get the row's sequences separately, as batches [n, L, ...] of similar lengths. Padding is at a sequence's end, so
no state that is read comes from it. If sequences share a prompt, a mixer runs over each sequence's own copy of it.

A decoder layer gets the row's layout as an argument, so a layer that is recomputed for its gradient gets the layout of
the same row.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import InvalidInput
from paceline.learner.batch.samples import SequenceLayout
from paceline.models.architectures import COUNTING_ATTENTION, MIXERS


def keep_sequences_apart(model: Any, layers: list[Any]) -> None:
    """Give the mixers of a model, which are in its decoder `layers`, a forward that runs over each sequence alone. Raises
    InvalidInput if the model's type has mixers but none is found."""
    kind = model.config.get_text_config().model_type
    class_name = MIXERS.get(kind) or COUNTING_ATTENTION.get(kind)
    if class_name is None:
        return
    found = False
    for layer in (layer for layer in layers if type(layer).__name__ != class_name):
        mixers = [module for module in layer.modules() if type(module).__name__ == class_name]
        found = found or bool(mixers)
        takes_layout = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(layer.forward).parameters.values())
        layer.forward = partial(_with_layout, layer.forward, mixers, takes_layout)
        layer.register_forward_pre_hook(partial(_add_layout, model), with_kwargs=True)
    for module in model.modules():
        if type(module).__name__ == class_name:
            left_out: Any = torch.compiler.disable
            module.forward = partial(left_out(_apart), module, module.forward, kind in COUNTING_ATTENTION)
    if not found:
        raise InvalidInput(
            f"models of type {model.config.model_type!r} have no {class_name} in this release of transformers; install "
            "the release that constraints.txt names"
        )


def _add_layout(model: Any, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add the layout to a layer's arguments; some models do not pass it on."""
    return args, {**kwargs, "layout": model.row_layout}


def _with_layout(
    forward: Callable[..., Any],
    mixers: list[Any],
    takes_layout: bool,
    *args: Any,
    layout: SequenceLayout,
    **kwargs: Any,
) -> Any:
    for mixer in mixers:
        mixer.row_layout = layout
    return forward(*args, **kwargs, layout=layout) if takes_layout else forward(*args, **kwargs)


def _apart(mixer: Any, forward: Callable[..., Any], is_attention: bool, *args: Any, **kwargs: Any) -> Any:
    """Return the mixer's result over a row, computed over each of its sequences alone. Arguments and results are
    tensors [1, T, ...], tuples with them, or other values, which stay as they are. Attention gets each sequence as a
    separate row."""
    layout: SequenceLayout = mixer.row_layout
    kwargs.pop("layout", None)
    num_tokens = sum(count * length for count, length in layout.runs)
    own = None
    if layout.shared:
        tokens, own = layout.unshared.tokens, layout.unshared.own
        args, kwargs = _map((args, kwargs), num_tokens, lambda x: x.index_select(1, tokens))
        layout, num_tokens = layout.unshared.layout, len(tokens)
    if is_attention:
        lengths = [length for count, length in layout.runs for _ in range(count)]
        begins = itertools.accumulate(lengths, initial=0)
        batches = [
            torch.arange(at, at + n, device=layout.starts.device)[None] for at, n in zip(begins, lengths, strict=False)
        ]
    else:
        batches = list(layout.padded.tokens)
    results = []
    for tokens_nL in batches:
        some_args, some_kwargs = _map((args, kwargs), num_tokens, partial(_batch, tokens_nL))
        if is_attention:
            some_kwargs["layout"] = SequenceLayout.of([tokens_nL.shape[1]], tokens_nL.device)
        results.append(forward(*some_args, **some_kwargs))
    whole, num_computed = _join(results), sum(each.numel() for each in batches)
    if not is_attention:
        own = layout.padded.own if own is None else layout.padded.own.index_select(0, own)
    return whole if own is None else _map(whole, num_computed, lambda x: x.index_select(1, own))


def _batch(tokens_nL: Tensor, x: Tensor) -> Tensor:
    return x[0].index_select(0, tokens_nL.flatten()).reshape(*tokens_nL.shape, *x.shape[2:])


def _map(value: Any, num_tokens: int, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with each tensor [1, T, ...] in it replaced by the function's result."""
    if isinstance(value, Tensor):
        return function(value) if value.ndim > 1 and value.shape[:2] == (1, num_tokens) else value
    if isinstance(value, dict):
        return {name: _map(each, num_tokens, function) for name, each in value.items()}
    if isinstance(value, tuple):
        return tuple(_map(each, num_tokens, function) for each in value)
    return value


def _join(results: list[Any]) -> Any:
    """Return the results of the runs as one result of the row."""
    first = results[0]
    if isinstance(first, Tensor):
        return torch.cat([each.reshape(1, -1, *each.shape[2:]) for each in results], dim=1)
    if isinstance(first, tuple):
        return tuple(_join(list(parts)) for parts in zip(*results, strict=True))
    return first
