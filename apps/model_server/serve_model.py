"""`paceline serve model`: serve one model through the OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from paceline.apps.registry.fetch import public_key_option, verified_model
from paceline.errors import InvalidInput
from paceline.services.cli.chat import changed, spec_of_model, with_generation
from paceline.services.cli.render import FOLDER, PATH
from paceline.services.common.access.insecure import check_host, insecure_option
from paceline.services.common.options import MAX_MB, PORT, device_option, directory_option
from paceline.services.common.processes.starting import set_library_variables

if TYPE_CHECKING:
    from paceline.apps.model_server.trace_log import TraceLog

BATCH_SIZE = 32


@click.command()
@click.argument("model", metavar="RUN|FOLDER|URL|NAME@ALIAS")
@click.option("--name", help="Model name for clients; default: the run's id or the folder's name.")
@click.option("--host", default="127.0.0.1", show_default=True, callback=check_host, help="Address to listen on.")
@insecure_option
@click.option("--port", type=PORT, default=8000, show_default=True, help="HTTP port; 0 takes a free one.")
@click.option(
    "--backend", type=click.Choice(["native", "vllm"]), default="native", show_default=True, help="Engine that samples."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    help="Longest completion if a request sets no length; default: the run's.",
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(1),
    default=BATCH_SIZE,
    show_default=True,
    help="Sequences decoded at a time.",
)
@click.option(
    "--traces", type=FOLDER, help="Folder to write requests and feedback to, as traces. Default: none are written."
)
@click.option(
    "--max-traces-mb",
    type=click.IntRange(1, MAX_MB),
    default=1024,
    show_default=True,
    help="Largest size of that folder; the oldest files are removed.",
)
@public_key_option
@device_option
@directory_option
@click.option("--ready-file", type=PATH, help="File to write the base URL to, once the server listens.")
@click.pass_context
def main(
    context: click.Context,
    model: str,
    name: str | None,
    host: str,
    port: int,
    backend: str,
    max_new_tokens: int | None,
    max_batch_size: int,
    traces: Path | None,
    max_traces_mb: int,
    public_key: Path | None,
    device: str,
    directory: Path,
    ready_file: Path | None,
) -> None:
    """Serve a model with the OpenAI API: the exported model of a run (its id or its folder), a model folder or its URL,
    or a registered model (NAME:VERSION, NAME@ALIAS).

    Nothing trains beside it, so clients such as evaluation harnesses get the whole engine. A registered model's files
    and signature are verified first, with --public-key; so is a folder from `paceline models fetch`, if a key is given.
    """
    from paceline.apps.model_server.serving import endpoint_of, model_label, opened_model
    from paceline.services.common.processes.starting import announce
    from paceline.services.common.serving.grpc_server import run_service

    set_library_variables()
    label = name or model_label(model)
    required = context.get_parameter_source("public_key") is ParameterSource.COMMANDLINE

    async def serve(stop: asyncio.Event) -> None:
        async with (
            opened_model(spec, label, device_of(device)) as served,
            endpoint_of(served, host, port, recorder) as url,
        ):
            click.echo(f"{served.run_id} at {url}", err=True)
            announce(ready_file, url)
            await stop.wait()  # no deadline: it serves until it is stopped

    with verified_model(model, directory, public_key, required=required) as checked:
        spec = changed(spec_of_model(checked, directory), None, max_new_tokens)
        spec = with_generation(spec, backend=backend, max_batch_size=max_batch_size)
        with _recorder(traces, spec.policy.model_name, label, max_traces_mb) as recorder:
            run_service(serve)


@contextlib.contextmanager
def _recorder(folder: Path | None, model: str, label: str, max_mb: int) -> Iterator[TraceLog | None]:
    """Yield the recorder of traces in a folder; None without one. Traces name the version of a registered `model`, else
    the `label`. Raises Conflict while another process writes there."""
    if folder is None:
        yield None
        return
    from paceline.apps.model_server.serving import registered_name
    from paceline.apps.model_server.trace_log import TraceLog
    from paceline.services.local.folder_lock import FolderLock

    lock = FolderLock(folder / ".lock", "model server", "--traces")
    lock.take()
    try:
        with contextlib.closing(TraceLog(folder, registered_name(model) or label, max_mb << 20)) as log:
            yield log
    finally:
        lock.release()


def device_of(device: str) -> str:
    """Return the torch device that --device names. Raises InvalidInput for a GPU that does not exist."""
    import torch

    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise InvalidInput("--device is cuda, but torch finds no usable GPU; see `paceline doctor`")
    return ("cuda" if found else "cpu") if device == "auto" else device
