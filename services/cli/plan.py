"""`paceline plan`: what a run takes of each device, whether it fits, and what would make it fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from paceline.errors import NotFound
from services.common.options import json_option, print_json

if TYPE_CHECKING:
    from paceline.models.memory_plan import Plan
    from paceline.spec import RunSpec


@click.command()
@click.argument("spec", type=click.Path())
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@json_option
def plan(spec: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Estimate the memory that SPEC takes on each device; exit status 1 if it does not fit, with the keys that make it fit.

    For GPUs that are not here say their size: cluster.gpu_gb=80. Only the model's config.json is read.
    """
    from paceline.models.auto_settings import planned
    from paceline.models.memory_estimate import gigabytes
    from paceline.models.memory_plan import plan as plan_of
    from paceline.models.memory_remedies import refusal
    from paceline.models.shape import read_shape
    from paceline.spec.reading import load_spec
    from services.local.room import cluster_here, room_here

    wanted = load_spec(spec, overrides)
    shape = read_shape(wanted.policy.model_name)
    if shape is None:
        raise NotFound(
            f"policy.model_name {wanted.policy.model_name!r}: no config.json with the usual keys is on this machine; name a "
            "local folder, or download the model's config.json first (`hf download NAME config.json`)"
        )
    wanted, division = cluster_here(wanted)
    room = room_here()
    wanted, chosen = planned(wanted, shape, room)
    made = plan_of(wanted, shape, room)
    why_not = refusal(wanted, shape, room)
    if as_json:
        print_json(_as_json(wanted, made, chosen, why_not))
    else:
        for line in (division, *chosen):
            if line:
                click.echo(line)
        click.echo(f"model of {shape.parameters / 1e6:,.0f} M parameters, {shape.layers} layers")
        click.echo(
            f"learner of {wanted.cluster.learner_ranks} ranks: {made.mesh.replicate} × {made.mesh.shard} (replicate × shard), "
            f"micro-batches of {made.estimate.micro_batch_tokens:,} tokens, checkpointing "
            f"{wanted.policy.activation_checkpointing}"
        )
        for load in made.loads:
            room_text = "" if load.room_bytes is None else f" of {gigabytes(load.room_bytes)}"
            click.echo(f"{load.device}: {gigabytes(load.bytes)}{room_text}")
            for name, size in load.parts.items():
                click.echo(f"  {size / 1e9:9.2f} GB  {name}")
        if made.cached_tokens is not None:
            longest = wanted.policy.max_total_sequence_length
            click.echo(
                f"each engine's cache holds {made.cached_tokens:,} tokens: {made.cached_tokens / longest:,.1f} sequences of "
                f"{longest:,}"
            )
        unknown = [load.device for load in made.loads if load.room_bytes is None]
        if why_not:
            click.echo(f"does not fit: {why_not}")
        elif unknown:
            click.echo(f"not compared: the memory of {unknown[0]} is not known; set cluster.gpu_gb")
        else:
            click.echo('fits, by an estimate (docs/performance.md, "Memory plan")')
    if why_not:
        raise click.exceptions.Exit(1)


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
        "devices": [
            {
                "device": load.device,
                "room_bytes": load.room_bytes,
                "bytes": load.bytes,
                "parts": dict(load.parts),
            }
            for load in made.loads
        ],
    }
