"""The remedy for a model or data set that was looked for on the hub and not found there."""

from __future__ import annotations

from pathlib import Path

FOLDERS = {
    "checkpoints",
    "ckpt",
    "data",
    "datasets",
    "export",
    "home",
    "mnt",
    "model",
    "models",
    "out",
    "output",
    "outputs",
    "results",
    "root",
    "runs",
    "tmp",
    "weights",
}
"""First parts of a name that are folders far more often than organisations."""


def hub_remedy(name: str) -> str:
    """Return the clause for a `name` that the hub did not give: it may be a path, or the hub cannot be reached."""
    parts = name.rstrip("/").split("/")
    if Path(name).is_absolute() or parts[0] in (".", "..", "~"):
        return "there is no such folder; check the path"
    if len(parts) > 2 or parts[0].lower() in FOLDERS or (len(parts) > 1 and Path(parts[0]).is_dir()):
        return f"it looks like a path and was taken for a name on the hub; write ./{name} for a path below the spec's folder"
    return (
        "it was looked for on the hub; check the name, or name a folder. Without network set HF_HUB_OFFLINE=1, which uses "
        "what was downloaded before"
    )
