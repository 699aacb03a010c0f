"""The dimension by which a tensor-parallel engine divides each weight, from the plan that Transformers has for the
architecture (`base_model_tp_plan` of the config, `_tp_plan` of the class).

A plan that divides a product's columns divides the rows of the weight, and the other way round. Weights that are not in
the result are whole on every rank, among them keys and values with fewer heads than ranks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_KEYS_AND_VALUES = ("k_proj", "v_proj")


def split_dimensions(model_class: Any, config: Any, size: int) -> dict[str, int]:
    """Return the dimension by the layer's name, with `*` for the number of a layer, for `size` ranks."""
    prefix = getattr(model_class, "base_model_prefix", "model")
    plan = {
        f"{prefix}.{name}": style
        for name, style in (getattr(config, "base_model_tp_plan", None) or {}).items()
    }
    plan |= getattr(model_class, "_tp_plan", None) or {}
    dimensions = {}
    for name, style in plan.items():
        whole_heads = config.num_key_value_heads % size == 0 or not name.endswith(_KEYS_AND_VALUES)
        if style.startswith("colwise") and whole_heads:
            dimensions[name] = 0
        elif style.startswith("rowwise"):
            dimensions[name] = 1
    return dimensions


def split_dimension(
    dimensions: Mapping[str, int], name: str, shape: tuple[int, ...], size: int
) -> int | None:
    """Return the dimension by which the tensor of this name is divided; None where every rank has all of it."""
    layer = re.sub(r"\.\d+\.", ".*.", name).removesuffix(".weight").removesuffix(".bias")
    dimension = dimensions.get(layer)
    if dimension is None or dimension >= len(shape) or shape[dimension] % size:
        return None
    return dimension
