"""A tiny GRPO run that proves a deployment: `python -m paceline.services.demo.smoke DIRECTORY --model-root ROOT`. `helm
test` writes the files in a pod with torch, and submits run.yaml from a pod without torch. The model goes below ROOT,
the deployment's object store; data and spec stay in DIRECTORY and travel with the run."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click
import yaml

from paceline.errors import PacelineError
from paceline.files.storage import Folder
from paceline.services.demo.task import make_model, write_data

SEED = 0


def write_run(directory: Path, model_root: str, steps: int) -> Path:
    """Write data and run.yaml to `directory` and a model below `model_root`, a folder or a URL; return the spec's path.
    Raises SpecError and OSError."""
    write_data(directory / "data", SEED)
    model = Folder(model_root) / "model"
    model.make()
    with tempfile.TemporaryDirectory() as made:
        make_model(Path(made), seed=SEED, hidden=32)
        for path in sorted(Path(made).iterdir()):
            model.write(path.name, path.read_bytes())
    spec = directory / "run.yaml"
    spec.write_text(yaml.safe_dump(_spec(str(model), steps), sort_keys=False))
    return spec


def _spec(model: str, steps: int) -> dict[str, object]:
    return {
        "name": "smoke",
        "policy": {
            "model_name": model,
            "max_total_sequence_length": 16,
            "optimizer": {"lr": 1.0e-4},
            "generation": {"max_new_tokens": 6, "max_batch_size": 64},
        },
        "data": {"train": "./data/train.jsonl"},
        "rewards": [{"function": "exact_match"}],
        "grpo": {"num_prompts_per_step": 4, "num_generations_per_prompt": 4, "max_num_steps": steps},
        "async_grpo": {"max_trajectory_age_steps": 1},
    }


@click.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--model-root", required=True, help="Folder or URL for the model, which all services can read.")
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True, help="Steps of the run.")
def main(directory: Path, model_root: str, steps: int) -> None:
    """Write a tiny run to DIRECTORY and its model below --model-root."""
    try:
        spec = write_run(directory, model_root, steps)
    except (PacelineError, OSError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(f"{spec}: submit it with `paceline submit {spec} --wait`")


if __name__ == "__main__":
    main()
