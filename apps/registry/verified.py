"""The model that `paceline serve model` serves, after a check of its signature where it is a registered one.

Promise: a version that is named by its reference is not served unless all its files are as registered and signed. A version in an
object store is copied first, and the copy is what is checked and served; it is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import click

from paceline.apps.registry.fetch import check_files, checked_copy
from paceline.files.bounded_cache import spool_folder
from paceline.files.names import STATEMENT
from paceline.files.storage import Folder
from paceline.services.cli.registered_models import registered_model


@contextlib.contextmanager
def verified_model(model: str, directory: Path, public_key: Path | None, *, required: bool) -> Iterator[str]:
    """Give the model to serve: for NAME:VERSION and NAME@ALIAS the folder that was checked, for others the same text.

    A folder that was fetched is checked too where there is a key. With `required`, a model without a signature is refused. Raises
    UsageError without a key for a registered model, DataError, which names the file that differs, NotFound.
    """
    with contextlib.ExitStack() as stack:
        if not _is_files(model) and (found := registered_model(model, directory)) is not None:
            if public_key is None:
                raise click.UsageError(
                    f"{model} is served after a check of its signature, which needs the key of whoever signs; name it with "
                    "--public-key"
                )
            folder = Folder(found.path).local
            if folder is None:
                folder = stack.enter_context(_scratch())
                checked_copy(found, folder, public_key)
            else:
                check_files(found, folder, public_key)
            yield str(folder)
            return
        if public_key is not None and Folder(model).exists(STATEMENT):
            _check_fetched(Folder(model), public_key)
        elif required:
            raise click.UsageError(
                f"--public-key checks a registered model, and {model} has no {STATEMENT}; leave the option out, or register the model"
            )
        yield model


def _is_files(model: str) -> bool:
    return "://" in model or (Path(model).expanduser() / "config.json").is_file()


def _check_fetched(folder: Folder, public_key: Path) -> None:
    """Check a registered folder that is not on this machine's record."""
    from paceline.apps.registry.folder import verify_folder

    if folder.local is None:
        raise click.UsageError(
            f"--public-key checks files on this machine, and {folder} is elsewhere; fetch the model with `paceline models fetch "
            "--verify` and serve that folder"
        )
    verify_folder(folder.local, public_key)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Give an empty folder, which is removed at the end; those of processes that were killed go at the next call."""
    from paceline.learner.checkpoints.export_folder import remove_left_overs

    spool = spool_folder() / "served"
    remove_left_overs(spool)
    folder = spool / f".{uuid.uuid4().hex}.partial-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
