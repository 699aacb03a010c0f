"""`paceline serve model`: one model behind the OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from paceline.errors import InvalidInput
from services.cli.chat import changed, spec_of_model
from services.common.insecure import check_host, insecure_option
from services.common.options import device_option, directory_option

BATCH_SIZE = 32


@click.command()
@click.argument("model", metavar="RUN|FOLDER|URL")
@click.option("--name", help="Name that clients ask for; default the run's id or the folder's name.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, callback=check_host, help="Address to listen on."
)
@insecure_option
@click.option("--port", default=8000, show_default=True, help="HTTP port; 0 takes a free one.")
@click.option(
    "--backend",
    type=click.Choice(["native", "vllm"]),
    default="native",
    show_default=True,
    help="Engine that samples.",
)
@click.option(
    "--max-new-tokens", type=int, help="Longest completion where a request names none; default the run's."
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(1),
    default=BATCH_SIZE,
    show_default=True,
    help="Sequences decoded at a time.",
)
@device_option
@directory_option
@click.option(
    "--ready-file", type=click.Path(path_type=Path), help="File to write the base URL to, once it listens."
)
def main(
    model: str,
    name: str | None,
    host: str,
    port: int,
    backend: str,
    max_new_tokens: int | None,
    max_batch_size: int,
    device: str,
    directory: Path,
    ready_file: Path | None,
) -> None:
    """Serve the exported model of a run (its id or its folder), or a model folder or its URL, by the OpenAI API.

    Nothing trains beside it, so clients such as evaluation harnesses get the whole engine.
    """
    from services.common.grpc_server import run_service
    from services.common.processes.ready_file import announce
    from services.model_server.serving import endpoint_of, model_label, opened_model

    spec = changed(spec_of_model(model, directory), None, max_new_tokens)
    update = {"backend": backend, "max_batch_size": max_batch_size}
    generation = spec.policy.generation.model_copy(update=update)
    spec = spec.model_copy(update={"policy": spec.policy.model_copy(update={"generation": generation})})

    async def serve(stop: asyncio.Event) -> None:
        async with (
            opened_model(spec, name or model_label(model), device_of(device)) as served,
            endpoint_of(served, host, port) as url,
        ):
            click.echo(f"{served.run_id} at {url}", err=True)
            announce(ready_file, url)
            await stop.wait()  # without a deadline: it serves until it is told to end

    run_service(serve)


def device_of(device: str) -> str:
    """Return the torch device that --device names. Raises InvalidInput for a GPU that is not there."""
    import torch

    found = torch.cuda.is_available()
    if device == "cuda" and not found:
        raise InvalidInput("--device is cuda, and torch finds no GPU that it can use; see `paceline doctor`")
    return ("cuda" if found else "cpu") if device == "auto" else device
