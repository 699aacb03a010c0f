"""Commands about workers: members, generate."""

from __future__ import annotations

import click

from paceline.client import Client
from services.cli import render
from services.common.options import coordinator_option, json_option, print_json


@click.command()
@coordinator_option
@json_option
def members(coordinator: str, as_json: bool) -> None:
    """List the workers that are members now; as JSON lines with --json."""
    with Client(coordinator) as client:
        facts = [render.member_facts(member) for member in client.members()]
    if as_json:
        for member_facts in facts:
            print_json(member_facts)
    else:
        render.print_table(
            render.MEMBER_COLUMNS,
            [render.member_row(member_facts) for member_facts in facts],
            empty="no workers yet",
        )


@click.command()
@click.argument("prompt")
@click.option("--n", default=1, show_default=True, help="Number of completions.")
@click.option("--temperature", type=float, help="Sampling temperature; default the run's.")
@click.option("--max-new-tokens", type=int, help="Longest completion; default the run's.")
@click.option(
    "--seed", default=0, show_default=True, help="The same seed and weights give the same completions."
)
@coordinator_option
@json_option
def generate(
    prompt: str,
    n: int,
    temperature: float | None,
    max_new_tokens: int | None,
    seed: int,
    coordinator: str,
    as_json: bool,
) -> None:
    """Ask the rollout worker with the newest weights for completions of PROMPT; as JSON lines with --json."""
    with Client(coordinator) as client:
        completions = client.generate(
            prompt, n=n, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
        )
    for completion in completions:
        facts = render.completion_facts(completion)
        if as_json:
            print_json(facts)
        else:
            click.echo(facts["text"])
