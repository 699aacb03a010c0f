"""`paceline eval FILE --model MODEL`: measure a model on the validation set of a file, without a run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from paceline.errors import InvalidInput
from paceline.spec import RunSpec
from paceline.tasks import FOLDER, task_file, task_names
from services.cli.chat import spec_of_model
from services.common.options import device_option, directory_option, json_option, print_json


def _file_or_task(_context: click.Context, _argument: click.Parameter, name: str) -> Path:
    file = task_file(name) or Path(name)
    if not file.is_file():
        raise click.BadParameter(
            f"{name!r} is neither a file nor a task; tasks are {', '.join(task_names())}",
            param_hint="FILE|TASK",
        )
    return file


def _list_tasks(context: click.Context, _option: click.Parameter, is_set: bool) -> None:
    if is_set:
        click.echo("\n".join(task_names()))
        context.exit()


@click.command("eval")
@click.argument("file", metavar="FILE|TASK", callback=_file_or_task)
@click.argument("overrides", nargs=-1)
@click.option(
    "--list",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_list_tasks,
    help="List the tasks and exit.",
)
@click.option(
    "--model",
    required=True,
    metavar="RUN|FOLDER|URL",
    help="Exported model of a run, or a model folder or its URL.",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for result and samples.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of sampling and of the intervals.")
@click.option(
    "--processes",
    default=1,
    show_default=True,
    type=click.IntRange(1),
    help="Problems that are scored at one time.",
)
@device_option
@directory_option
@json_option
def evaluate(
    file: Path,
    overrides: tuple[str, ...],
    model: str,
    output: Path,
    seed: int,
    processes: int,
    device: str,
    directory: Path,
    as_json: bool,
) -> None:
    """Sample the validation prompts of FILE from a model, score them with its reward functions, and write the result.

    FILE has the keys of a run: data.validation, rewards, policy.generation, grpo.max_val_samples and
    grpo.val_samples_per_prompt. So the spec of a run is such a file. OVERRIDES are as for a run. A TASK is a file that comes
    with Paceline, for a public data set; data.validation=./FILE with data.validation_config=null reads it from a file.
    """
    from paceline.evaluation.results import write_result
    from services.cli.serve_model import device_of
    from services.evaluation.runner import evaluate as run
    from services.model_server.serving import model_label, opened_model

    spec = evaluation_spec(file, overrides, spec_of_model(model, directory))

    async def measure() -> tuple[dict[str, Any], list[dict[str, Any]]]:
        async with opened_model(spec, model_label(model), device_of(device)) as served:
            return await run(served, seed, processes)

    result, samples = asyncio.run(measure())
    whole = write_result(output, result | {"name": spec.name, "digests": digests(spec)}, samples)
    if as_json:
        print_json(whole)
        return
    click.echo(f"{whole['problems']} problems, {whole['failed']} failed, {whole['k']} completions each")
    for name, found in whole["metrics"].items():
        click.echo(f"  {name:32} {found['value']:.4f}  [{found['low']:.4f}, {found['high']:.4f}]")
    for failure in whole["failures"]:
        click.echo(f"  {failure}", err=True)
    click.echo(f"written to {output}")


def evaluation_spec(file: Path, overrides: tuple[str, ...], model: RunSpec) -> RunSpec:
    """Return the spec in `file` for the model of another one. Raises SpecError, InvalidInput without validation data."""
    from paceline.spec.reading import apply_override, parse_spec, read_tree

    tree = read_tree(file)
    for override in overrides:
        apply_override(tree, override)
    if file.parent == FOLDER and isinstance(tree["data"].get("validation"), str):
        tree["data"]["validation"] = _from_here(tree["data"]["validation"])
    data = tree.get("data") if isinstance(tree.get("data"), dict) else {}
    if not data or not data.get("validation"):
        raise InvalidInput(f"{file}: data.validation is not set; name the data set with the problems")
    policy = tree.get("policy") or {}
    lora = {"enabled": False}
    tree["policy"] = {
        "max_total_sequence_length": model.policy.max_total_sequence_length,
        **policy,
        "model_name": model.policy.model_name,
        "tokenizer_name": model.policy.tokenizer_name,
        "lora_cfg": lora,
    }
    # The training set is not read; a run's spec names one, and an evaluation file need not.
    tree["data"] = {"train": data["validation"], **data}
    return parse_spec(tree, base=file.parent)


def _from_here(name: str) -> str:
    """Return a path of this directory as an absolute one, and any other name unchanged."""
    return str(Path(name).expanduser().resolve()) if Path(name).expanduser().exists() else name


def digests(spec: RunSpec) -> dict[str, str]:
    """Return the digests of what decides an evaluation: the spec, and the model's files where they are on this machine."""
    from paceline.evaluation.results import digest_of, folder_digest

    found = {"spec": digest_of(spec.model_dump(mode="json", exclude={"folder"}))}
    folder = Path(spec.policy.model_name)
    return found | ({"model": folder_digest(folder)} if folder.is_dir() else {})
