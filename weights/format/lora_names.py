"""Adapter rules that learner and rollout workers share: names on the wire, the merge, and the check for equal bases.

A LoRA adapter (Hu et al. 2021, arXiv 2106.09685) adds to the weight W of a linear layer the product of two thin
matrices, W' = W + (alpha/dim)·B·A, and only A and B are trained. The learner publishes A and B alone; every sampler has
W from the same `policy.model_name`. Names are those of peft's adapter files, so that peft and other engines can read
the published tensors. Axis suffixes: O outputs and I inputs of a layer, R the adapter's rank (`dim`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from paceline.errors import InvalidInput

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "base_model.model."
A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
FINGERPRINT = "base_fingerprint"
"""Name of the [8] uint8 tensor that is sent with an adapter: the `fingerprint` of the base that it was trained on."""


def wire_names(module: str) -> tuple[str, str]:
    """Return the names of A and B for the linear layer with the name `module` in the Hugging Face model."""
    return f"{PREFIX}{module}{A_SUFFIX}", f"{PREFIX}{module}{B_SUFFIX}"


def pairs(adapter: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Return (layer, A [R, I], B [O, R]) of every adapted layer. Raises InvalidInput for names of other tensors."""
    for name, a_RI in adapter.items():
        if name == FINGERPRINT or name.endswith(B_SUFFIX):
            continue
        module = name.removeprefix(PREFIX).removesuffix(A_SUFFIX)
        name_a, name_b = wire_names(module)
        if name != name_a or name_b not in adapter:
            raise InvalidInput(
                f"tensor {name!r} is not one of a pair {PREFIX}<layer>{A_SUFFIX} and {B_SUFFIX}; the run trains "
                "LoRA (policy.lora_cfg), so the weights must be an adapter"
            )
        yield module, a_RI, adapter[name_b]


def merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, scaling: float) -> Tensor:
    """Return [O, I] W + scaling·B·A, computed in float32 and rounded once, to W's type."""
    a_RI, b_OR = a_RI.to(weight_OI.device).float(), b_OR.to(weight_OI.device).float()
    return (weight_OI.float() + (b_OR @ a_RI) * scaling).to(weight_OI.dtype)


def fingerprint(
    state: Mapping[str, Tensor],
    *,
    identity: Callable[[Tensor], int] | None = None,
    whole: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return [8] uint8 that two bases share if they have the same weights: XXH3 over names and bytes of the weights,
    rounded to bfloat16 first, so that the precision in which a side read the files does not matter. Tied weights, which
    share their `identity` (default: the address of their data), count once. `whole` returns a tensor that has all
    elements."""
    import torch
    import xxhash

    digest, seen = xxhash.xxh3_64(), set()
    for name in sorted(state):
        tensor = state[name]
        key = identity(tensor) if identity else tensor.data_ptr()
        if key in seen:
            continue
        seen.add(key)
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        tensor = whole(tensor) if whole else tensor
        wire = tensor.detach().to("cpu", torch.bfloat16 if tensor.is_floating_point() else tensor.dtype)
        digest.update(wire.contiguous().view(-1).view(torch.uint8).numpy().data)
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)
