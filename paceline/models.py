"""Facts about models that every role must know alike: the supported LM heads and the type that "auto" stands for."""

from __future__ import annotations

from typing import Any

from paceline.errors import InvalidInput


def resolved_dtype(precision: str, device_type: str) -> str:
    """Return the name of torch's type for a precision of the spec; "auto" is bfloat16 on CUDA and float32 elsewhere.

    The learner, the engines and the reference must agree: otherwise the importance ratios are wrong without an error.
    """
    if precision == "auto":
        return "bfloat16" if device_type == "cuda" else "float32"
    return precision


def check_head(config: Any, name: str) -> None:
    """Raises InvalidInput for a model whose logits are more than the product of hidden states and a matrix.

    `config` is its transformers config, `name` the name from the spec. Log-probabilities from the product alone would be
    wrong without an error.
    """
    text = config.get_text_config()
    for key, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1.0), ("logit_scale", 1.0)):
        value = getattr(text, key, None)
        if value is not None and value != neutral:
            raise InvalidInput(f"policy.model_name {name!r}: {key} {value} of its logits is not supported")
