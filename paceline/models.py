"""Which LM heads Paceline computes: logits that are one product of hidden states and a matrix."""

from __future__ import annotations

from typing import Any

from paceline.errors import InvalidInput


def check_head(config: Any, name: str) -> None:
    """Raises InvalidInput for a model (its transformers config, and the name it was asked for by) that does more than that
    to its logits: log-probabilities from the product alone would be wrong in silence."""
    text = config.get_text_config()
    for key, neutral in (("final_logit_softcapping", None), ("logits_scaling", 1.0), ("logit_scale", 1.0)):
        value = getattr(text, key, None)
        if value is not None and value != neutral:
            raise InvalidInput(f"policy.model_name {name!r}: {key} {value} of its logits is not supported")
