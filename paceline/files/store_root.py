"""The root of a deployment's large files, which `--store` of the coordinator names: checkpoints, exports, stored weights.

A store that is away only delays what is written there. One that refuses is an error of the operator, which is reported before
a run starts.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import InvalidInput, SpecError
from paceline.files.storage import Folder, is_url, open_url

PROBE = ".paceline-store"
REFUSALS = (PermissionError, FileNotFoundError, NotADirectoryError)
"""Errors that trying again does not help."""
NO_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "NoAuthHandlerFound",
}
"""Errors of stores' clients, by name because the packages are optional."""


def store_root(text: str, directory: Path) -> str:
    """Return the root that `--store` names, an absolute path or a URL; empty for `directory`, the ledger's own folder.

    Raises InvalidInput for a scheme that is unknown or whose package is not installed.
    """
    if not text:
        return ""
    if is_url(text):
        try:
            open_url(text, "--store")
        except SpecError as error:
            raise InvalidInput(str(error)) from None
        return text.rstrip("/").removeprefix("file://")
    root = Path(text).expanduser().resolve()
    return "" if root == directory.resolve() else str(root)


def refusal(root: str) -> str:
    """Return why nothing can be written to a store, as a sentence; empty when it can, or when the store is away now."""
    folder = Folder(root)
    try:
        if folder.local is not None:
            folder.make()
            return (
                ""
                if os.access(folder.local, os.W_OK | os.X_OK)
                else _sentence(root, "you cannot write there")
            )
        folder.write(PROBE, b"")
    except REFUSALS as error:
        return _sentence(root, f"{type(error).__name__}: {error}")
    except Exception as error:  # the clients of object stores raise errors without a common base
        if type(error).__name__ in NO_CREDENTIALS:
            return _sentence(root, f"{type(error).__name__}: {error}")
    return ""


def _sentence(root: str, reason: str) -> str:
    return (
        f"--store {root!r} of the coordinator refuses to be written: {reason}; correct its name, its permissions or the "
        "credentials in the coordinator's environment"
    )
