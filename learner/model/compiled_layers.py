"""Decoder layers compiled by torch.compile (`policy.compile`), and rows padded for them.

Promise: the values and gradients of the plain layers, up to rounding. Padding is a sequence by itself at the end of the
row: no other token attends to it, and no loss reads it, so its gradient is zero.

Attention is left out of the compiled code, because its calls depend on the lengths in the row; each layer becomes one
graph before and one after it. All layers share both. A row's length is dynamic from the second length on, so a run
compiles each graph twice, and again for passes without a gradient; rows of few different lengths keep this bound where a
graph cannot be dynamic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from paceline.errors import InvalidInput
from paceline.learner.batch.layout import SequenceLayout
from paceline.learner.batch.samples import PackedBatch
from paceline.learner.model.attention import leave_out_of_graphs

ROW_MULTIPLE = 128
"""Rows are padded to multiples of this many tokens."""
COMPILED_VARIANTS = 64
"""Variants of one layer's code that are compiled before torch goes on without compilation: kinds of attention, with and
without gradients, and lengths of rows where they are not dynamic."""


def compile_layers(layers: Sequence[nn.Module], device: torch.device) -> None:
    """Compile the forward of each layer, at its first call. Raises InvalidInput where this machine cannot compile."""
    _require_compiler(device)
    leave_out_of_graphs()
    settings: Any = torch._dynamo.config
    settings.recompile_limit = max(settings.recompile_limit, COMPILED_VARIANTS)
    for layer in layers:
        layer.forward = torch.compile(layer.forward)


def padded_row(packed: PackedBatch) -> PackedBatch:
    """Return the batch with tokens, positions and layout of a row padded to a multiple of ROW_MULTIPLE."""
    extra = -packed.input_ids.shape[1] % ROW_MULTIPLE
    if extra == 0:
        return packed
    device = packed.input_ids.device
    positions_E = torch.arange(extra, device=device)
    return dataclasses.replace(
        packed,
        input_ids=pad(packed.input_ids, (0, extra)),
        position_ids=torch.cat((packed.position_ids, positions_E[None]), dim=1),
        layout=_with_sequence(packed.layout, extra),
    )


def _with_sequence(layout: SequenceLayout, length: int) -> SequenceLayout:
    end: Tensor = layout.starts[-1:] + length
    return SequenceLayout(
        (*layout.runs, (1, length)), torch.cat((layout.starts, end)), max(layout.max_length, length)
    )


def _require_compiler(device: torch.device) -> None:
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise InvalidInput(
                "policy.compile is true, but Triton, which torch.compile needs on GPUs, does not work here; install "
                "the triton package that belongs to this torch, or set policy.compile to false"
            )
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise InvalidInput(
            "policy.compile is true, but torch.compile finds no C++ compiler here, which it needs on CPUs; install g++ (or "
            "name one in the environment variable CXX), or set policy.compile to false"
        ) from None
