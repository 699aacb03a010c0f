"""Commands about workers: members, generate."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.client import Client
from services.cli import render
from services.cli.chat import changed, open_talk, spec_of_model
from services.common.options import coordinator_option, directory_option, json_option, print_json

if TYPE_CHECKING:
    from paceline.groups import Completion
    from paceline.spec import RunSpec


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
@click.option(
    "--export",
    "exported",
    metavar="RUN|FOLDER|URL",
    help="Sample from this run's exported model, or the model at this folder or URL, in this process: no service has to run.",
)
@coordinator_option
@directory_option
@json_option
def generate(
    prompt: str,
    n: int,
    temperature: float | None,
    max_new_tokens: int | None,
    seed: int,
    exported: str | None,
    coordinator: str,
    directory: Path,
    as_json: bool,
) -> None:
    """Ask the rollout worker with the newest weights for completions of PROMPT; as JSON lines with --json."""
    if exported is not None:
        spec = changed(spec_of_model(exported, directory), temperature, max_new_tokens)
        for text, sampled in asyncio.run(_from_export(spec, prompt, n, seed)):
            if as_json:
                spans = [[s.start, s.end, s.session, s.step] for s in sampled.spans]
                ids, logprobs = sampled.token_ids.tolist(), sampled.logprobs.tolist()
                reason = sampled.finish_reason
                print_json(
                    {
                        "text": text,
                        "token_ids": ids,
                        "logprobs": logprobs,
                        "finish_reason": reason,
                        "spans": spans,
                    }
                )
            else:
                click.echo(text)
        return
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


async def _from_export(spec: RunSpec, prompt: str, n: int, seed: int) -> list[tuple[str, Completion]]:
    """Return text and completion of each of `n` samples; the prompt is encoded as a rollout worker does."""
    from paceline.data.tokens import encode_prompt

    talk = await open_talk(spec, seed)
    try:
        data = spec.data
        ids = encode_prompt(talk.tokenizer, prompt, data.apply_chat_template, data.chat_template_kwargs)
        return [(talk.text(completion), completion) for completion in await talk.sample(ids, n)]
    finally:
        await talk.engine.close()
