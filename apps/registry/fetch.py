"""`paceline models fetch` and `paceline models push`: bring a version's verified files to this machine or to the hub.

`verified_model` yields the model that `paceline serve model` serves. Promise: a version that is named by its
reference is served only if all its files are as registered and signed. From an object store, a copy is verified, served
and removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.apps.registry.facts import model_facts, stage_fault
from paceline.errors import Conflict, DataError, PacelineError
from paceline.files.bounded_cache import spool_folder
from paceline.files.names import STATEMENT
from paceline.files.storage import Folder, unavailable
from paceline.models.registered import read_reference
from paceline.services.cli.recorded.source import models_of, registered_model, source_options
from paceline.services.cli.render import FILE, PATH
from paceline.services.common.options import json_option, print_json

if TYPE_CHECKING:
    from paceline.v1.registry_pb2 import RegisteredModel

MODEL = "NAME[:VERSION|@ALIAS]"
public_key_option = click.option(
    "--public-key", envvar="PACELINE_PUBLIC_KEY", show_envvar=True, type=FILE, help="Public key (PEM) of the signer."
)


@click.command()
@click.argument("model", metavar=MODEL)
@click.argument("destination", type=PATH)
@click.option(
    "--stage",
    type=click.Choice(["passed", "promoted"]),
    help="Refuse a version that has not reached this stage. passed: its gates have passed it; promoted: it was promoted. A version "
    "that was rolled back is in neither stage.",
)
@click.option("--verify", is_flag=True, help="Also verify the signature, with --public-key.")
@public_key_option
@source_options
@json_option
def fetch(
    model: str,
    destination: Path,
    stage: str | None,
    verify: bool,
    public_key: Path | None,
    directory: Path,
    coordinator: str | None,
    as_json: bool,
) -> None:
    """Copy the files of a registered model to the new folder DESTINATION, which appears whole or not at all.

    The digest of every file, of its evaluations and of its verdicts is compared with the record; a file that differs is refused
    by its name.
    """
    from paceline.learner.checkpoints.export_folder import written_beside

    if verify and public_key is None:
        raise click.UsageError("--verify needs the signer's key; name it with --public-key")
    found = found_model(model, stage, directory, coordinator)
    with written_beside(destination) as folder:
        checked_copy(found, folder, public_key if verify else None)
    if as_json:
        print_json(model_facts(found) | {"folder": str(destination), "verified": verify})
    else:
        how = "its signature is valid" if verify else "its signature was not checked (--verify)"
        click.echo(f"{destination}: {found.name}:{found.version}, {found.stage}; every file is as registered, {how}")


@click.command()
@click.argument("model", metavar=MODEL)
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--public", is_flag=True, help="Make a new repository public; default: private.")
@click.option("--stage", type=click.Choice(["passed", "promoted"]), help="As for `paceline models fetch`.")
@source_options
@json_option
def push(
    model: str,
    repository: str,
    public: bool,
    stage: str | None,
    directory: Path,
    coordinator: str | None,
    as_json: bool,
) -> None:
    """Upload a registered model to a repository of the Hugging Face hub, in one commit. huggingface_hub's HF_TOKEN has
    the token, HF_ENDPOINT the address."""
    from huggingface_hub import HfApi

    found = found_model(model, stage, directory, coordinator)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        checked_copy(found, folder, None)
        api = HfApi(library_name="paceline")
        try:
            api.create_repo(repository, private=not public, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repository, folder_path=folder, commit_message=f"{found.name} version {found.version}"
            )
        except Exception as error:  # the hub's client and its transport raise errors without a common base
            raise unavailable(f"{repository} cannot be written at {api.endpoint}", error) from None
    if as_json:
        print_json({"repository": repository, "commit": commit.oid, "url": commit.commit_url})
    else:
        click.echo(f"{repository}: {found.name}:{found.version} in commit {commit.oid}")


def found_model(model: str, stage: str | None, directory: Path, coordinator: str | None) -> RegisteredModel:
    """Return the version that a text names. Raises NotFound, InvalidInput, or Conflict if it has not reached the stage."""
    with models_of(directory, coordinator) as models:
        found: RegisteredModel = models.show(read_reference(model)).model
    if stage and (why := stage_fault(found, stage)):
        raise Conflict(f"{found.name}:{found.version} is not {stage}, because {why}; name another version or alias")
    return found


def checked_copy(model: RegisteredModel, folder: Path, public_key: Path | None) -> None:
    """Copy the files of a version into an empty folder and verify them. Raises NotFound, DataError naming the file."""
    from paceline.apps.registry.folder import copy_folder

    source = Folder(model.path)
    try:
        copy_folder(source, folder)
    except PacelineError as error:
        raise type(error)(f"{source}: {error}") from None
    check_files(model, folder, public_key)


def check_files(model: RegisteredModel, folder: Path, public_key: Path | None) -> None:
    """Verify the files of a version, in its folder or in a copy. Raises DataError, which names the file, or NotFound."""
    from paceline.apps.registry.folder import verify_folder
    from paceline.files.names import STATEMENT

    source = Folder(model.path)
    try:
        contents = verify_folder(folder, public_key)
    except PacelineError as error:
        raise type(error)(f"{source}: {error}") from None
    if contents.statement_sha256 != model.statement_sha256:
        raise DataError(
            f"{source}: {STATEMENT} has the SHA-256 {contents.statement_sha256}, but {model.statement_sha256} is recorded; its "
            "files were registered again without a record, or changed. Register the model again"
        )


@contextlib.contextmanager
def verified_model(model: str, directory: Path, public_key: Path | None, *, required: bool) -> Iterator[str]:
    """Yield the model to serve: for NAME:VERSION and NAME@ALIAS the verified folder, for any other text the text
    itself.

    A fetched folder is verified too if a key is given; with `required`, a model without a signature is refused. Raises
    UsageError for a registered model without a key, DataError naming the file that differs, or NotFound.
    """
    with contextlib.ExitStack() as stack:
        is_files = "://" in model or (Path(model).expanduser() / "config.json").is_file()
        if not is_files and (found := registered_model(model, directory)) is not None:
            if public_key is None:
                raise click.UsageError(
                    f"{model} is served only with a verified signature, which needs the signer's key; name it with "
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
                f"--public-key verifies a registered model, and {model} has no {STATEMENT}; leave the option out, or register the model"
            )
        yield model


def _check_fetched(folder: Folder, public_key: Path) -> None:
    from paceline.apps.registry.folder import verify_folder

    if folder.local is None:
        raise click.UsageError(
            f"--public-key verifies files on this machine, and {folder} is not on this machine; fetch "
            "the model with `paceline models fetch "
            "--verify` and serve that folder"
        )
    verify_folder(folder.local, public_key)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    """Yield an empty folder, and remove it at the end. The next call removes the folders that killed processes left."""
    from paceline.learner.checkpoints.export_folder import remove_left_overs

    spool = spool_folder() / "served"
    remove_left_overs(spool)
    folder = spool / f".{uuid.uuid4().hex}.partial-{os.getpid()}"
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
