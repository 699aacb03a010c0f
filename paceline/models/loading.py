"""Facts about models that every role must know alike: the supported LM heads and the type that "auto" stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.errors import InvalidInput, Unreadable, error_text, is_about_input
from paceline.models.hub_names import hub_remedy

FILE_WORDS = ("mismatch", "PytorchStreamReader", "state_dict")
"""Words in torch's errors that are about the files of a model; its other errors are about the device."""


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


def fault_of_load(field: str, name: str, error: BaseException) -> InvalidInput | None:
    """Return what to raise for an exception that loading model `name`, of the spec's `field`, has raised: InvalidInput for
    files that are damaged or do not fit together, Unreadable for those that cannot be read now, as from a hub that does
    not answer. None for an exception that is not about the files, such as one of the device or a lack of memory.
    """
    if isinstance(error, InvalidInput):
        return error
    is_of_files = any(words in str(error) for words in FILE_WORDS)
    is_nesting = isinstance(error, RecursionError)  # of JSON
    if not is_about_input(error) or (isinstance(error, RuntimeError) and not (is_of_files or is_nesting)):
        return None
    is_local = Path(name).expanduser().is_dir()
    if isinstance(error, OSError) or not (is_local or isinstance(error, ValueError)):
        remedy = "" if is_local else f"; {hub_remedy(name)}"
        return Unreadable(f"{field} {name!r} cannot be loaded: {error_text(error)}{remedy}")
    return InvalidInput(
        f"{field} {name!r} cannot be loaded: {error_text(error)}; are its files complete? Copy or download them again"
    )
