"""Facts about models that all roles share: supported LM heads, the type behind "auto", sizes and faults of files."""

from __future__ import annotations

import contextlib
from pathlib import Path

from paceline.errors import InvalidInput, Unreadable, error_text, is_about_input
from paceline.host.regular_file import read_named, without_quotations

FOLDERS = {
    "checkpoints", "ckpt", "data", "datasets", "export", "home", "mnt", "model", "models", "out", "output",
    "outputs", "results", "root", "runs", "tmp", "weights",
}  # fmt: skip
"""Beginnings of names that are usually folders, not organisations."""


def hub_remedy(name: str) -> str:
    """Return the remedy for a `name` at which no model or data set was found: a folder with other files, a path that
    does not exist, or a name on a hub that may be unreachable."""
    if Path(name).is_dir():
        return "name the files in that folder (./folder/*.jsonl), or a folder made by `save_to_disk`"
    parts = name.rstrip("/").split("/")
    if Path(name).is_absolute() or parts[0] in (".", "..", "~"):
        return "there is no such folder; check the path"
    if len(parts) > 2 or parts[0].lower() in FOLDERS or (len(parts) > 1 and Path(parts[0]).is_dir()):
        return f"the name looks like a path and was used as a name on the hub; write ./{name} for a path below the spec's folder"
    return (
        "the name was searched on the hub; check it, or name a folder. Without network set HF_HUB_OFFLINE=1, which uses "
        "earlier downloads"
    )


FILE_WORDS = ("mismatch", "PytorchStreamReader", "state_dict")
"""Words in torch's errors that concern a model's files; its other errors concern the device."""


def resolved_dtype(precision: str, device_type: str) -> str:
    """Return the name of torch's type for a precision of the spec; "auto" is bfloat16 on CUDA and float32 elsewhere.
    Learner, engines and reference must agree, otherwise the importance ratios are wrong without an error."""
    if precision == "auto":
        return "bfloat16" if device_type == "cuda" else "float32"
    return precision


def fault_of_load(field: str, name: str, error: BaseException) -> InvalidInput | None:
    """Return the error to raise for an exception from loading model `name` of the spec's `field`: InvalidInput for
    files that are damaged or do not match, Unreadable for files that cannot be read now (a hub that does not
    answer), None for an exception that does not concern the files, such as a lack of memory."""
    if isinstance(error, InvalidInput):
        return error
    is_of_files = any(words in str(error) for words in FILE_WORDS)
    is_nesting = isinstance(error, RecursionError)  # of JSON
    if not is_about_input(error) or (isinstance(error, RuntimeError) and not (is_of_files or is_nesting)):
        return None
    is_local, said = Path(name).expanduser().is_dir(), error_text(error)
    if is_local:  # its files came in no bundle
        content = _texts_of(Path(name).expanduser())
        said = without_quotations(said.replace("`", "'"), lambda quoted: quoted not in content)
    if isinstance(error, OSError) or not (is_local or isinstance(error, ValueError)):
        remedy = "" if is_local else f"; {hub_remedy(name)}"
        return Unreadable(f"{field} {name!r} cannot be loaded: {said}{remedy}")
    return InvalidInput(
        f"{field} {name!r} cannot be loaded: {said}; are its files complete? Copy or download them again"
    )


def _texts_of(folder: Path) -> str:
    """Return the text files of a model's folder, one after the other."""
    texts = []
    for path in (path for kind in ("*.json", "*.jinja", "*.txt") for path in folder.glob(kind)):
        with contextlib.suppress(OSError):
            texts.append(read_named(path).decode(errors="replace"))
    return "\n".join(texts)


def weights_bytes(model_name: str) -> int:
    """Return the bytes of a model's weights in a folder; 0 for a URL, a hub name or another machine's folder."""
    try:
        files = [*Path(model_name).expanduser().glob("*.safetensors")]
        return sum(file.stat().st_size for file in files)
    except (OSError, ValueError, RuntimeError):
        return 0


def named_size(model_name: str) -> str:
    """Return a model's name with the size of its weights, if known: `./model (0.99 GB)`."""
    size_bytes = weights_bytes(model_name)
    if not size_bytes:
        return model_name
    return (
        f"{model_name} ({size_bytes / 1e9:.2f} GB)"
        if size_bytes >= 1e7
        else f"{model_name} ({size_bytes / 1e6:.1f} MB)"
    )
