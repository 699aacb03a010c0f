"""`paceline plan`: estimate a run's memory, whether it fits, keys that make it fit, and its speed on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.errors import InvalidInput, NotFound, counted
from paceline.services.cli.render import FILE
from paceline.services.common.options import json_option, print_json

if TYPE_CHECKING:
    from paceline.apps.planning.capacity import Capacity
    from paceline.models.memory_plan import Plan
    from paceline.models.shape import ModelShape
    from paceline.spec import RunSpec

SPEEDS = (
    *("sequences_per_engine", "generation_s", "sampled_tokens_per_s", "training_s", "step_s"),
    *("trained_tokens_per_s", "age"),
)
COSTS = ("coordinator_mb_per_s", "coordinator_load", "cost_per_hour", "cost_per_million_tokens", "limit")


NO_ESTIMATE = "lacks usual keys, or has latent attention or layers with states, for which there is no estimate"


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option(
    "--gpus",
    metavar="NAME:NUMBER",
    help="Plan for these GPUs, such as h100:64, or for cores of a CPU (cpu:8): split, step time, age, cost and limit.",
)
@click.option(
    "--prices",
    type=FILE,
    help="With --gpus: YAML or JSON file with the price of one GPU for an hour by name, such as {h100: 2.5}.",
)
@click.option("--prompt-tokens", type=float, help="With --gpus: mean length of a prompt; default half of its room.")
@click.option(
    "--completion-tokens", type=float, help="With --gpus: mean length of a completion; default half of max_new_tokens."
)
@click.option("--model-config", type=FILE, help="The model's config.json, if the model is not on this machine.")
@json_option
def plan(
    spec: str,
    overrides: tuple[str, ...],
    gpus: str | None,
    prices: Path | None,
    prompt_tokens: float | None,
    completion_tokens: float | None,
    model_config: Path | None,
    as_json: bool,
) -> None:
    """Estimate SPEC's memory on each device; exit status 1 if it does not fit, with the keys that make it fit.

    With --gpus, also estimate the split of GPUs between learner and engines, the time and cost of a step, and what
    limits the run. Without --gpus, set the memory of GPUs that are not here with cluster.gpu_gb=80. Only the model's
    config.json is read.
    """
    from paceline.models.memory_plan import plan as plan_of
    from paceline.models.memory_plan import planned, refusal
    from paceline.models.shape import read_config, read_shape
    from paceline.services.local.room import cluster_here, room_here
    from paceline.spec.reading import load_spec

    run_spec = load_spec(spec, overrides)
    shape = read_shape(run_spec.policy.model_name) if model_config is None else _shape_in(model_config)
    if shape is None and read_config(run_spec.policy.model_name) is not None:
        raise InvalidInput(f"policy.model_name {run_spec.policy.model_name!r}: its config.json {NO_ESTIMATE}")
    if shape is None:
        raise NotFound(
            f"policy.model_name {run_spec.policy.model_name!r}: no config.json is on this machine; name a "
            "local folder, download the model's config.json first (`hf download NAME config.json`), or name it with --model-config"
        )
    if gpus is not None:
        _plan_for(run_spec, shape, gpus, _price_in(prices, gpus), prompt_tokens, completion_tokens, as_json)
        return
    run_spec, division = cluster_here(run_spec)
    room = room_here()
    run_spec, chosen = planned(run_spec, shape, room)
    made = plan_of(run_spec, shape, room)
    why_not = refusal(run_spec, shape, room)
    if as_json:
        print_json(_as_json(run_spec, made, chosen, why_not))
    else:
        _print_plan(run_spec, made, [division, *chosen], why_not)
    if why_not:
        raise click.exceptions.Exit(1)


def _print_plan(spec: RunSpec, made: Plan, chosen: list[str], why_not: str) -> None:
    shape, ranks, longest = made.estimate.shape, spec.cluster.learner_ranks, spec.policy.max_total_sequence_length
    for line in filter(None, chosen):
        click.echo(line)
    click.echo(f"model of {shape.parameters / 1e6:,.0f} M parameters, {shape.layers} layers")
    click.echo(
        f"learner of {counted(ranks, 'rank')}: {made.mesh.replicate} × {made.mesh.shard} (replicate × shard), "
        f"micro-batches of {made.estimate.micro_batch_tokens:,} tokens, checkpointing {spec.policy.activation_checkpointing}"
    )
    _print_loads(made)
    if made.cached_tokens is not None:
        sequences = made.cached_tokens / longest
        click.echo(
            f"each engine's cache holds {made.cached_tokens:,} tokens: {sequences:,.1f} sequences of {longest:,}"
        )
    if made.estimate.learner_on_gpu and made.estimate.kept_versions:
        kept = made.estimate.kept_versions / 1e9
        click.echo(f"each learner rank keeps {kept:.1f} GB of older versions in host memory, for logger.verify_share")
    unknown = [load.device for load in made.loads if load.room_bytes is None]
    if why_not:
        click.echo(f"does not fit: {why_not}")
    elif unknown:
        click.echo(f"not compared with the memory of {unknown[0]}, which is unknown; set cluster.gpu_gb")
    else:
        click.echo('fits, by an estimate (docs/operate/performance.md, "Memory plan")')


def _print_loads(made: Plan) -> None:
    from paceline.models.memory_estimate import gigabytes

    for load in made.loads:
        room_text = "" if load.room_bytes is None else f" of {gigabytes(load.room_bytes)}"
        click.echo(f"{load.device}: {gigabytes(load.bytes)}{room_text}")
        for name, size in load.parts.items():
            click.echo(f"  {size / 1e9:9.2f} GB  {name}")


def _plan_for(
    spec: RunSpec,
    shape: ModelShape,
    gpus: str,
    price: float | None,
    prompt_tokens: float | None,
    completion_tokens: float | None,
    as_json: bool,
) -> None:
    """Print the plan for GPUs that may be on other machines. Raises SpecError if the run does not fit on them."""
    from paceline.apps.planning.capacity import plan_capacity
    from paceline.apps.planning.processors import read_gpus

    processor, number = read_gpus(gpus)
    lengths = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    made = plan_capacity(spec, shape, processor, number, price=price, **lengths)
    if as_json:
        print_json(capacity_facts(made))
        return
    work, what = made.work, "GPUs" if processor.is_gpu else "cores"
    shared = ", which take turns on it" if made.is_shared else ""
    engines = f", {counted(made.engines, 'engine')} of {made.gpus_per_engine}" if made.engines else ""
    lines = [
        f"{number} {processor.name} {what}: {counted(made.ranks, 'learner rank')}{engines}{shared}",
        f"a step: {work.sequences:,} sequences of {work.prompt_tokens:,.0f} + {work.completion_tokens:,.0f} tokens (means)",
    ]
    if made.engines:
        lines.append(
            f"generation {made.generation_s:,.2f} s ({made.sampled_tokens_per_s:,.0f} tokens/s; an engine has room for "
            f"{made.sequences_per_engine:,.0f} sequences)"
        )
    lines += [
        f"training {made.training_s:,.2f} s",
        f"step {made.step_s:,.2f} s, {made.trained_tokens_per_s:,.0f} trained tokens/s, age {made.age:.1f}",
    ]
    if made.engines:
        lines.append(
            f"coordinator {made.groups_per_s:,.2f} groups/s, {made.coordinator_mb_per_s:,.2f} MB/s: {made.coordinator_load:.1%} of "
            "what one coordinator was measured to commit"
        )
    if made.cost_per_million_tokens is not None:
        lines.append(
            f"cost {made.cost_per_million_tokens:,.4g} for a million trained tokens ({made.cost_per_hour:,.2f} an hour)"
        )
    lines += [f"limited by {made.limit}", f"rates: {processor.measured}"]
    for line in lines:
        click.echo(line)
    _print_loads(made.memory)


def capacity_facts(made: Capacity) -> dict[str, object]:
    work = {name: getattr(made.work, name) for name in ("sequences", "prompt_tokens", "completion_tokens")}
    return {
        "processor": made.processor.name,
        "number": made.number,
        "rates": made.processor.measured,
        "learner_ranks": made.ranks,
        "engines": made.engines,
        "gpus_per_engine": made.gpus_per_engine,
        "take_turns": made.is_shared,
        **work,
        **{name: getattr(made, name) for name in SPEEDS},
        "coordinator_groups_per_s": made.groups_per_s,
        **{name: getattr(made, name) for name in COSTS},
        "devices": _devices(made.memory),
    }


def _shape_in(path: Path) -> ModelShape:
    import json

    from paceline.models.shape import shape_of

    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise NotFound(f"--model-config {path} cannot be read as JSON: {error}") from None
    shape = shape_of(config) if isinstance(config, dict) else None
    if shape is None:
        raise InvalidInput(f"--model-config {path} {NO_ESTIMATE}")
    return shape


def _price_in(path: Path | None, gpus: str) -> float | None:
    import yaml

    if path is None:
        return None
    try:
        prices = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise NotFound(f"--prices {path} cannot be read as YAML: {error}") from None
    name = gpus.partition(":")[0].lower()
    price = prices.get(name) if isinstance(prices, dict) else None
    if isinstance(price, bool) or not isinstance(price, int | float) or not 0 <= price < 1e6:
        raise InvalidInput(
            f"--prices {path}: the price of {name} is {price!r}; it must be a number, as in {{{name}: 2.5}}"
        )
    return float(price)


def _devices(made: Plan) -> list[dict[str, object]]:
    return [
        {"device": load.device, "room_bytes": load.room_bytes, "bytes": load.bytes, "parts": dict(load.parts)}
        for load in made.loads
    ]


def _as_json(spec: RunSpec, made: Plan, chosen: list[str], why_not: str) -> dict[str, object]:
    return {
        "fits": made.fits,
        "why_not": why_not,
        "chosen": chosen,
        "parameters": made.estimate.shape.parameters,
        "replicate": made.mesh.replicate,
        "shard": made.mesh.shard,
        "micro_batch_tokens": made.estimate.micro_batch_tokens,
        "activation_checkpointing": spec.policy.activation_checkpointing,
        "cached_tokens": made.cached_tokens,
        "devices": _devices(made),
    }
