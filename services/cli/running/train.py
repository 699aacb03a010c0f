"""`paceline grpo|sft|dpo|kto|orpo|rm|distillation|offline_grpo SPEC`: trains a spec of that algorithm, with local
services or at a coordinator. The eight names are one command; a spec with another algorithm is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import click

from paceline.client import Client
from paceline.errors import SpecError
from paceline.services.cli.running.progress import Shown, shown_options
from paceline.services.cli.running.up import no_page_option, run_here
from paceline.services.cli.running.watching import follow
from paceline.services.common.access.insecure import check_coordinator, insecure_option
from paceline.services.common.options import directory_option
from paceline.spec import RunSpec
from paceline.spec.run import Algorithm


def load_for(algorithm: str, spec: str, overrides: tuple[str, ...]) -> RunSpec:
    """Load the spec, with the command's algorithm if the spec names none. Raises SpecError, also if the spec names
    another algorithm."""
    from paceline.spec.reading import load_spec, read_tree

    named = read_tree(spec).get("algorithm", algorithm)
    loaded = load_spec(spec, (f"algorithm={named}", *overrides))
    if loaded.algorithm != algorithm:
        raise SpecError(
            f"{spec} has algorithm {loaded.algorithm!r}, but the command is `paceline {algorithm}`; use "
            f"`paceline {loaded.algorithm}`, or change the spec"
        )
    return loaded


def _command(algorithm: str) -> click.Command:
    @click.command(
        algorithm,
        help=f"Train SPEC with algorithm {algorithm} and watch the run. Without --coordinator all services that the run needs "
        "are started on this host, as by `paceline up`.",
    )
    @click.argument("spec", type=click.Path())
    @click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
    @click.option(
        "--coordinator",
        metavar="HOST:PORT",
        callback=check_coordinator,
        help="Queue the run at this coordinator instead of starting services on this host.",
    )
    @insecure_option
    @directory_option
    @no_page_option
    @shown_options
    def train(**options: Any) -> None:
        _train(algorithm, **options)

    return train


def _train(
    algorithm: str,
    spec: str,
    overrides: tuple[str, ...],
    coordinator: str | None,
    directory: Path,
    no_page: bool,
    shown: Shown,
) -> None:
    loaded = load_for(algorithm, spec, overrides)
    if coordinator is None:
        run_here(loaded, directory, host="127.0.0.1", port=None, keep=False, shown=shown, page=not no_page)
        return
    with Client(coordinator) as client:
        follow(client, client.submit(loaded).run_id, shown=shown)


grpo, sft, dpo, kto, orpo, rm, distillation, offline_grpo = (_command(algorithm) for algorithm in get_args(Algorithm))
