"""`paceline eval FILE --model MODEL`: measure a model on the validation set of a file, without a run.

FILE has the keys of a run's spec. Its questions are compared with the data that the model was trained on.

Promise: a data set that cannot be compared is reported with the reason, never skipped in silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.apps.evaluation.tasks import TASKS, task_file, task_names
from paceline.data.preparation.filters import OVERLAP, OverlapIndex, prompt_texts
from paceline.data.rows import open_source
from paceline.errors import InvalidInput, PacelineError, counted
from paceline.services.cli.chat import spec_of_model, with_generation
from paceline.services.cli.render import FOLDER
from paceline.services.common.options import device_option, directory_option, json_option, print_json
from paceline.services.common.processes.starting import set_library_variables
from paceline.spec import RunSpec
from paceline.spec.sections.data import DataSource
from paceline.spec.sections.user_code import RewardFunctionSection

if TYPE_CHECKING:
    from paceline.apps.evaluation.runner import Evaluated
    from paceline.reward.endpoints.settings import EndpointSettings


def _file_or_task(name: str) -> Path:
    file = task_file(name) or Path(name)
    if not file.is_file():
        raise click.BadParameter(
            f"{name!r} is neither a file nor a task; tasks: {', '.join(task_names())}", param_hint="FILE|TASK"
        )
    return file


def _list_tasks(context: click.Context, _option: click.Parameter, is_set: bool) -> None:
    if is_set:
        click.echo("\n".join(task_names()))
        context.exit()


@click.command("eval")
@click.argument("arguments", nargs=-1, metavar="FILE|TASK [OVERRIDES]...")
@click.option(
    "--list", is_flag=True, is_eager=True, expose_value=False, callback=_list_tasks, help="List the tasks and exit."
)
@click.option(
    "--model",
    metavar="RUN|FOLDER|URL|NAME@ALIAS",
    help="Exported model of a run, a model folder or its URL, a registered model of --directory, or the http(s) URL of an OpenAI-compatible endpoint, such as "
    "http://127.0.0.1:8000/v1.",
)
@click.option("--model-name", default="", help="Name of the model at an endpoint; default: its only model.")
@click.option("--api-key-env", help="Environment variable that holds the endpoint's key; its name must end in API_KEY.")
@click.option("--api-key-file", help="File that holds the endpoint's key; its name must end in api_key.")
@click.option(
    "--timeout",
    default=300.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="Time-out in seconds of a request to an endpoint; four attempts are made.",
)
@click.option(
    "--trained-on",
    multiple=True,
    metavar="DATA",
    help="Training data to compare the questions with, besides the run's own; repeatable.",
)
@click.option(
    "--with",
    "harness",
    type=click.Choice(["lm-eval", "inspect"]),
    help="Serve the model, run this harness against it with the arguments after --, and import its results.",
)
@click.option("--output", required=True, type=FOLDER, help="Folder to write the result and the samples to.")
@click.option("--seed", default=0, show_default=True, help="Seed of sampling and of the confidence intervals.")
@click.option("--processes", default=1, show_default=True, type=click.IntRange(1), help="Problems scored at a time.")
@device_option
@directory_option
@json_option
def evaluate(
    arguments: tuple[str, ...],
    model: str | None,
    model_name: str,
    api_key_env: str | None,
    api_key_file: str | None,
    timeout: float,
    trained_on: tuple[str, ...],
    harness: str | None,
    output: Path,
    seed: int,
    processes: int,
    device: str,
    directory: Path,
    as_json: bool,
) -> None:
    """Sample answers to the validation problems of FILE, score them with the reward functions, and write the result.

    FILE has the keys of a run: data.validation, rewards, policy.generation, grpo.max_val_samples and
    grpo.val_samples_per_prompt; a run's spec is such a file. The section `evaluation` is for evaluations only: it says
    whether answers are sampled or chosen by their log-probability. OVERRIDES are as for a run. A TASK is a file that
    comes with Paceline, for a public data set; data.validation=./FILE with data.validation_config=null reads the data
    set from a file.

    With --with there is no FILE: paceline eval --with lm-eval --model FOLDER --output results/lm -- --tasks gsm8k
    """
    from paceline.data.preparation.prepared import prepared_data
    from paceline.models.evaluation_results import write_result

    set_library_variables()
    if harness is not None:
        found = _by_harness(harness, arguments, model, device, directory, seed)
        _report(write_result(output, *found), output, as_json)
        return
    if not arguments:
        raise click.UsageError("Missing argument 'FILE|TASK'.")
    file, overrides = _file_or_task(arguments[0]), arguments[1:]
    endpoint = _endpoint(model, model_name, api_key_env, api_key_file, timeout)
    model_spec = _evaluated_model(model, file, directory)
    spec = evaluation_spec(file, overrides, model_spec)
    with prepared_data(spec, lambda run: (), validation_alone=True) as prepared:
        result, samples, questions = asyncio.run(
            _evaluated(prepared.spec(spec), model, endpoint, device, seed, processes)
        )
    result |= {"name": spec.name, "digests": digests(spec)}
    sets = _training_sets(model_spec, trained_on)
    warnings = _compare(result, sets, questions, spec.data.prompt_key) if sets else []
    whole = write_result(output, result, samples)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    _report(whole, output, as_json)


def _endpoint(
    model: str | None, name: str, key_env: str | None, key_file: str | None, timeout_s: float
) -> EndpointSettings | None:
    """Return the endpoint that --model names; None for a model in files. Raises InvalidInput."""
    from paceline.reward.endpoints.settings import EndpointSettings, checked_settings

    if model is None or not model.startswith(("http://", "https://")):
        given = {"--model-name": name, "--api-key-env": key_env, "--api-key-file": key_file}
        for option, value in given.items():
            if value:
                raise click.UsageError(f"{option} is for an endpoint, and --model is {model}, which is not a URL")
        return None
    url = model.rstrip("/")
    values = {
        "base_url": url if url.count("/") > 2 else f"{url}/v1",
        "model": name,
        "api_key_env": key_env,
        "api_key_file": key_file,
        "request_timeout_s": timeout_s,
        "cache": False,
    }
    return checked_settings(EndpointSettings, values, "--model")


def _evaluated_model(model: str | None, file: Path, directory: Path) -> RunSpec:
    """Return the spec of the model to evaluate. Raises UsageError if the file needs a model and none is named."""
    from paceline.spec.reading import read_tree

    if model is None:
        if reads_model(read_tree(file)):
            raise click.UsageError("Missing option '--model'.")
        return spec_of_endpoint("none")
    if model.startswith(("http://", "https://")):
        return spec_of_endpoint(model)
    return spec_of_model(model, directory, scores=_prefers(read_tree(file)))


def _prefers(tree: dict[str, Any]) -> bool:
    evaluation = tree.get("evaluation")
    return isinstance(evaluation, dict) and evaluation.get("method") == "prefer"


async def _evaluated(
    spec: RunSpec, model: str | None, endpoint: EndpointSettings | None, device: str, seed: int, processes: int
) -> Evaluated:
    from paceline.apps.evaluation.runner import evaluate as run

    if spec.evaluation.method == "prefer":
        return await run(None, spec, seed, processes)
    if endpoint is not None:
        from paceline.apps.evaluation.url_model import opened_url

        async with opened_url(spec, endpoint) as served:
            return await run(served, spec, seed, processes)
    from paceline.apps.evaluation.engine_model import EngineModel
    from paceline.apps.model_server.serve_model import device_of
    from paceline.apps.model_server.serving import model_label, opened_model

    async with opened_model(spec, model_label(model or ""), device_of(device)) as opened:
        return await run(EngineModel(opened), spec, seed, processes)


def _by_harness(
    harness: str, arguments: tuple[str, ...], model: str | None, device: str, directory: Path, seed: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Serve the model, run an external harness on it, and return the harness's result and samples."""
    from paceline.apps.evaluation.harnesses import HarnessRun, result_of, run_harness
    from paceline.apps.model_server.serve_model import BATCH_SIZE, device_of
    from paceline.apps.model_server.serving import model_label, opened_model

    if model is None or model.startswith(("http://", "https://")):
        raise click.UsageError(f"--with needs a model folder or a run, and --model is {model or 'missing'}")
    spec = with_generation(spec_of_model(model, directory), max_batch_size=BATCH_SIZE)

    async def run() -> HarnessRun:
        async with opened_model(spec, model_label(model), device_of(device)) as served:
            return await run_harness(served, harness, arguments)

    result, samples = result_of(asyncio.run(run()), harness, arguments, spec.policy.model_name, seed)
    return result | {"name": harness, "digests": digests(spec)}, samples


def _training_sets(model: RunSpec, named: tuple[str, ...]) -> list[DataSource]:
    own = [model.data.source()] if model.data.train != "none" else []
    return [*own, *(DataSource("--trained-on", name, "train") for name in named)]


def _compare(result: dict[str, Any], sets: list[DataSource], questions: list[str], prompt_key: str) -> list[str]:
    result["trained_on"] = compared(questions, sets, prompt_key)
    return warnings_of(result["trained_on"], len(questions))


def _report(whole: dict[str, Any], output: Path, as_json: bool) -> None:
    """Print a result. Exits with status 1 if no problem has a result."""
    if as_json:
        print_json(whole)
    else:
        _print(whole, output)
    if not whole["problems"]:
        raise click.exceptions.Exit(1)


def _print(whole: dict[str, Any], output: Path) -> None:
    click.echo(
        f"{counted(whole['problems'], 'problem')}, {whole['failed']} failed, {counted(whole['k'], 'completion')} each"
    )
    for name, found in whole["metrics"].items():
        click.echo(f"  {name:32} {found['value']:.4f}  [{found['low']:.4f}, {found['high']:.4f}]")
    for name, number in whole.get("unscored", {}).items():
        click.echo(
            f"  {number:,} completions got no number from {name}; the metrics of {name} do not count them", err=True
        )
    for failure in whole["failures"]:
        click.echo(f"  {failure}", err=True)
    click.echo(f"written to {output}")


Json = dict[str, Any]


def compared(questions: Sequence[str], sets: Sequence[DataSource], prompt_key: str) -> list[Json]:
    """Return, for each training set, the number of questions that it has and their first indices, or why the set was
    not compared."""
    index = OverlapIndex(questions)
    return [_compared(index, questions, source, prompt_key) for source in sets]


def _compared(index: OverlapIndex, questions: Sequence[str], source: DataSource, prompt_key: str) -> Json:
    name = source.name if isinstance(source.name, str) else ", ".join(source.name)
    try:
        rows = open_source(source)
    except PacelineError as error:
        return {"training": name, "not_compared": str(error)}
    texts = prompt_texts(rows, prompt_key)
    found = index.found_in(texts, questions)
    if not any(prompt_texts(rows, prompt_key)):
        return {"training": name, "not_compared": f"no column with prompts; columns: {list(rows.columns)}"}
    return {"training": name, "rows": len(rows), "questions": len(found), "first": found[:5]}


def warnings_of(found: Sequence[Json], num_questions: int) -> list[str]:
    lines = []
    for each in found:
        if "not_compared" in each:
            lines.append(f"{each['training']} could not be compared with the questions: {each['not_compared']}")
        elif each["questions"]:
            lines.append(
                f"{each['questions']:,} of {num_questions:,} questions have at least {OVERLAP:.0%} of their 13-word sequences in "
                f"{each['training']}, which the model was trained on (first: problem {each['first'][0]}); the result "
                "says little about new questions"
            )
    return lines


LONGEST = 4096
"""Largest number of tokens of prompt and completion together, for a model whose files are not on this machine."""


def spec_of_endpoint(url: str) -> RunSpec:
    return RunSpec.model_validate(
        {
            "policy": {"model_name": url, "max_total_sequence_length": LONGEST},
            "data": {"train": "none"},
            "rewards": [{"function": "exact_match"}],
        }
    )


def evaluation_spec(file: Path, overrides: tuple[str, ...], model: RunSpec) -> RunSpec:
    """Return the spec in `file`, with the model of `model`. Raises SpecError, or InvalidInput without validation data."""
    from paceline.spec.reading import apply_override, parse_spec, read_tree

    tree = read_tree(file)
    for override in overrides:
        apply_override(tree, override)
    if file.parent == TASKS and isinstance(tree["data"].get("validation"), str):
        tree["data"]["validation"] = _from_here(tree["data"]["validation"])
    data = tree.get("data") if isinstance(tree.get("data"), dict) else {}
    if not data or not data.get("validation"):
        raise InvalidInput(f"{file}: data.validation is not set; set it to the data set with the problems")
    policy = tree.get("policy") or {}
    generation = policy.get("generation") or {} if isinstance(policy, dict) else {}
    if not (isinstance(policy, dict) and isinstance(generation, dict)):
        return parse_spec(tree, base=file.parent)  # which says what they are
    tree["policy"] = {
        "max_total_sequence_length": model.policy.max_total_sequence_length,
        **policy,
        "model_name": model.policy.model_name,
        "tokenizer_name": model.policy.tokenizer_name,
        "lora_cfg": {"enabled": False},
        # Nothing trains on these samples, so no importance ratio could be biased.
        "generation": {"allow_biased_sampling": True, **generation},
    }
    # The training set is not read: a run's spec names one, an evaluation file need not.
    tree["data"] = {"train": data["validation"], **data}
    if isinstance(evaluation := tree.get("evaluation"), dict) and evaluation.get("method") == "prefer":
        _measure(tree, model.policy.model_name)
    spec = parse_spec(tree, base=file.parent)
    if spec.environment.is_used:
        raise InvalidInput(
            f"{file}: environment is set, but only a run samples episodes; submit the spec with grpo.val_at_start and "
            "grpo.val_at_end, or remove environment"
        )
    return spec


def reads_model(tree: dict[str, Any]) -> bool:
    """Return whether a file measures the model of `--model`; an evaluation of a judge needs no model."""
    evaluation, rewards = tree.get("evaluation"), tree.get("rewards")
    if not isinstance(evaluation, dict) or evaluation.get("method") != "prefer":
        return True
    return any(_path_argument(reward) is not None for reward in rewards or ())


def _measure(tree: dict[str, Any], model: str) -> None:
    for reward in tree.get("rewards") or ():
        argument = _path_argument(reward)
        if argument is not None:
            reward["kwargs"] = {argument: model, **(reward.get("kwargs") or {})}


def _path_argument(reward: Any) -> str | None:
    """Return the name of the keyword argument with a reward function's model; None if it has no such argument."""
    name = reward.get("function") if isinstance(reward, dict) else None
    return RewardFunctionSection.PATH_ARGUMENTS.get(name) if isinstance(name, str) else None


def _from_here(name: str) -> str:
    return str(Path(name).expanduser().resolve()) if Path(name).expanduser().exists() else name


def digests(spec: RunSpec) -> dict[str, str]:
    """Return the digests of an evaluation's inputs: the spec, and the model's files if they are on this machine."""
    from paceline.models.evaluation_results import digest_of, folder_digest

    found = {"spec": digest_of(spec.model_dump(mode="json", exclude={"folder"}))}
    folder = Path(spec.policy.model_name)
    return found | ({"model": folder_digest(folder)} if folder.is_dir() else {})
