"""A service's log without what its libraries write there by themselves."""

from __future__ import annotations

import os

QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
"""Variables to set before torch and huggingface_hub are imported. A link's store warns of every connection that its peer closed, as
at each normal stop, with the frames of a C++ stack; transformers draws a bar for the weights of each model, which makes a line of
hundreds of characters in a file."""


def quiet_libraries() -> None:
    """Set the variables that are not set, for this process and its later children."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
