"""The size of a model's weights on this machine, for messages about how long it loads."""

from __future__ import annotations

from pathlib import Path


def weights_bytes(model_name: str) -> int:
    """Return the bytes of the weights in a model's folder; 0 for a URL, a name on the hub or a folder that is not here."""
    try:
        files = [*Path(model_name).expanduser().glob("*.safetensors")]
        return sum(file.stat().st_size for file in files)
    except (OSError, ValueError, RuntimeError):
        return 0


def named_size(model_name: str) -> str:
    """Return a model's name with the size of its weights, where that is known: `./model (0.99 GB)`."""
    size_bytes = weights_bytes(model_name)
    if not size_bytes:
        return model_name
    return (
        f"{model_name} ({size_bytes / 1e9:.2f} GB)"
        if size_bytes >= 1e7
        else f"{model_name} ({size_bytes / 1e6:.1f} MB)"
    )
