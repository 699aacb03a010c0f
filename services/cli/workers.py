"""Commands about workers: members, drain, generate."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from paceline.client import Client
from paceline.errors import InvalidInput, NotFound, PacelineError, Unavailable
from paceline.services.cli import render
from paceline.services.cli.chat import changed, open_talk, spec_of_model
from paceline.services.common.options import coordinator_option, directory_option, json_option, print_json
from paceline.services.common.processes.starting import quiet_libraries
from paceline.services.common.reporting.terminal import visible

if TYPE_CHECKING:
    from paceline.groups import Completion
    from paceline.spec import RunSpec

LEAVING_S = 30.0
"""Seconds after its grace in which a worker leaves: it returns what is unfinished, or writes a checkpoint."""
POLL_S = 0.2


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
@click.argument("member")
@click.option(
    "--grace", "grace_s", default=60.0, show_default=True, help="Seconds in which it may finish its work."
)
@coordinator_option
@json_option
def drain(member: str, grace_s: float, coordinator: str, as_json: bool) -> None:
    """Tell a worker to finish its work and leave, and wait until it has left; exit status 1 if it stays.

    MEMBER is its id, or the first characters of one id. It takes nothing new; groups that are not finished after --grace
    are returned with their tokens, and others go on with them.
    """
    with Client(coordinator) as client:
        member_id = _member(client, member)
        held, started_s = client.drain(member_id, grace_s), time.monotonic()
        if not as_json:
            work = "1 group" if held == 1 else f"{held} groups"
            click.echo(f"{member_id} holds {work} and has {grace_s:g} s to finish")
        while any(one.member_id == member_id for one in client.members()):
            if time.monotonic() - started_s > grace_s + LEAVING_S:
                raise PacelineError(
                    f"{member_id} is still a member {LEAVING_S:g} s after its grace; end its process, and the coordinator gives its "
                    "work to others"
                )
            time.sleep(POLL_S)
    seconds = time.monotonic() - started_s
    if as_json:
        print_json({"member_id": member_id, "held": held, "seconds": round(seconds, 3)})
    else:
        click.echo(f"{member_id} has left after {seconds:.1f} s")


def _member(client: Client, text: str) -> str:
    """Return the id of the member that `text` names. Raises NotFound, InvalidInput."""
    ids = [member.member_id for member in client.members()]
    found = [text] if text in ids else [member_id for member_id in ids if member_id.startswith(text)]
    if not found:
        raise NotFound(f"no member {text!r}; there are {', '.join(ids) or 'none'}")
    if len(found) > 1:
        raise InvalidInput(f"{text!r} is the begin of several members: {', '.join(found)}; give more of it")
    return found[0]


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
    metavar="RUN|FOLDER|URL|NAME@ALIAS",
    help="Sample from this run's exported model, the model at this folder or URL, or a registered one, in this process: no service "
    "has to run.",
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
        quiet_libraries()
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
                click.echo(visible(text))
        return
    try:
        with Client(coordinator) as client:
            completions = client.generate(
                prompt, n=n, temperature=temperature, max_new_tokens=max_new_tokens, seed=seed
            )
    except Unavailable as error:
        raise Unavailable(
            f"{error}; without services --export RUN samples from a run's exported model"
        ) from None
    for completion in completions:
        facts = render.completion_facts(completion)
        if as_json:
            print_json(facts)
        else:
            click.echo(visible(facts["text"]))


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
