"""`paceline convert SOURCE DESTINATION`: weights between model folders and checkpoints of torch.distributed.checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import click

from paceline.services.cli import render
from paceline.services.common.options import json_option


@click.command()
@click.argument("source", metavar="FOLDER|URL")
@click.argument("destination", metavar="FOLDER|URL")
@click.option(
    "--to",
    type=click.Choice(["folder", "dcp"]),
    default="folder",
    show_default=True,
    help="A Hugging Face model folder, or a checkpoint of torch.distributed.checkpoint.",
)
@click.option(
    "--dtype", type=click.Choice(["bfloat16", "float16", "float32"]), help="Type of the weights. Default: as in SOURCE."
)
@click.option(
    "--adapter",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder of a LoRA adapter, as peft saves it, to merge into the model.",
)
@click.option(
    "--quantize",
    type=click.Choice(["int8", "float8"]),
    help="Quantize the 16-bit or 32-bit weights of linear layers by torchao.",
)
@click.option(
    "--config",
    metavar="FOLDER|URL",
    help="For a checkpoint: model folder with its config.json and tokenizer. Default: the checkpoint's folder.",
)
@click.option(
    "--key",
    help="For a checkpoint: entry of the state dict that has the weights. Default: `model`, or the whole state dict.",
)
@json_option
def convert(
    source: str,
    destination: str,
    to: str,
    dtype: str | None,
    adapter: Path | None,
    quantize: Literal["int8", "float8"] | None,
    config: str | None,
    key: str | None,
    as_json: bool,
) -> None:
    """Convert weights: a model folder to a checkpoint of torch.distributed.checkpoint (--to dcp), such a checkpoint to
    a model folder, or a model folder to another type, with a merged adapter or quantized weights.

    Without --dtype, --adapter and --quantize every bit of the weights stays. Peak memory does not grow with the model,
    except for --quantize, which loads the whole model.
    """
    import torch

    from paceline.host.resources import return_large_tensors
    from paceline.learner.checkpoints.conversion import folders

    return_large_tensors()  # else blocks of several sizes leave holes in the heap
    torch_dtype: torch.dtype | None = getattr(torch, dtype) if dtype else None
    of_dcp = folders.is_dcp(source)
    _check_options(of_dcp, to, dtype, adapter, quantize, config, key)
    options: dict[str, Any] = {"dtype": torch_dtype}
    if of_dcp:
        folders.from_dcp(source, destination, config=config, key=key, **options)
    elif to == "dcp":
        folders.to_dcp(source, destination, adapter=adapter, **options)
    elif quantize:
        from paceline.learner.checkpoints.conversion.folders import quantize_folder

        quantize_folder(source, destination, quantize)
    else:
        folders.to_folder(source, destination, adapter=adapter, **options)
    render.answer(as_json, {"source": source, "path": destination, "to": to}, f"{destination}: the weights of {source}")


def _check_options(
    of_dcp: bool,
    to: str,
    dtype: str | None,
    adapter: Path | None,
    quantize: str | None,
    config: str | None,
    key: str | None,
) -> None:
    if of_dcp and to == "dcp":
        raise click.UsageError("SOURCE is a checkpoint of torch already; omit --to dcp to make a model folder of it")
    if of_dcp and (adapter or quantize):
        raise click.UsageError(
            "--adapter and --quantize need a model folder; convert the checkpoint to a model folder first"
        )
    if not of_dcp and (config or key):
        raise click.UsageError("--config and --key are for a checkpoint, but SOURCE is a model folder; omit them")
    if quantize and (to == "dcp" or adapter or dtype):
        raise click.UsageError(
            "--quantize cannot be combined with --to dcp, --adapter or --dtype; convert first, then quantize the result"
        )
    if not of_dcp and to == "folder" and not (dtype or adapter or quantize):
        raise click.UsageError("nothing to convert: give --to dcp, --dtype, --adapter or --quantize")
