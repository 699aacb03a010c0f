"""The remedy for a model or data set that a name did not give: a folder, a path that is not there, or a name on the hub."""

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
    """Return the clause for a `name` that gave nothing: a folder of other files, a path, or a hub that cannot be reached."""
    if Path(name).is_dir():
        return "name the files in that folder (./folder/*.jsonl), or a folder made by `save_to_disk`"
    parts = name.rstrip("/").split("/")
    if Path(name).is_absolute() or parts[0] in (".", "..", "~"):
        return "there is no such folder; check the path"
    if len(parts) > 2 or parts[0].lower() in FOLDERS or (len(parts) > 1 and Path(parts[0]).is_dir()):
        return f"it looks like a path and was taken for a name on the hub; write ./{name} for a path below the spec's folder"
    return (
        "it was looked for on the hub; check the name, or name a folder. Without network set HF_HUB_OFFLINE=1, which uses "
        "what was downloaded before"
    )
