"""Where a reward model comes from, and whether other weights are there by now."""

from __future__ import annotations

import re
from pathlib import Path

import xxhash

from paceline.errors import Unreadable
from paceline.files.model_source import model_source
from paceline.files.storage import Folder, is_url
from paceline.files.whole_file import stamp

OF_STEP = re.compile(r"step-(\d{1,18})")
FILES = ("*.json", "*.safetensors", "*.bin", "*.model", "*.jinja")


def located(path: str) -> str:
    """Return `path`, or of a folder of exports (`step-10`, `step-20` …) its newest one. Raises Unreadable for a folder with
    neither."""
    is_folder = is_url(path) or Path(path).expanduser().is_dir()
    if not is_folder:
        return path
    try:
        folder = Folder(path if is_url(path) else Path(path).expanduser())
        if folder.exists("config.json"):
            return path
        steps = [
            (int(match[1]), each) for each in folder.folders() if (match := OF_STEP.fullmatch(each.name))
        ]
        for _, export in sorted(steps, key=lambda step: -step[0]):
            if export.exists("config.json"):
                return str(export)
    except Unreadable:
        raise
    except Exception as error:  # the clients of object stores raise errors without a common base
        raise Unreadable(f"reward model {path!r} cannot be read: {type(error).__name__}: {error}") from None
    raise Unreadable(
        f"reward model {path!r} has no config.json, and no export step-N in it; name an exported reward model's folder"
    )


def fetched(path: str, *, weights: bool = True) -> tuple[str, str]:
    """Return what transformers' `from_pretrained` takes, and the version of the files there: both change with them.

    Files of a URL are copied to this host, with `weights` or without. Raises Unreadable when they cannot be read now, InvalidInput for an unknown URL.
    """
    place = located(path)
    source = model_source(place, "reward model", weights=weights)
    if not Path(source).is_dir():
        return source, source  # a name on the hub, of which transformers keeps one copy
    content = repr((place, source, stamp(Path(source), FILES)))
    name = Path(place.rstrip("/")).name
    return source, f"{name}-{xxhash.xxh3_64(content.encode()).hexdigest()[:8]}"
