"""`paceline spec`: check a spec and print it resolved, or explain keys."""

from __future__ import annotations

import click

from paceline.errors import NotFound
from paceline.services.common.options import json_option, print_json


@click.command()
@click.argument("file", type=click.Path(), required=False)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("--explain", metavar="KEY", help="Only explain a key, a section, or another library's name for either.")
@json_option
def spec(file: str | None, overrides: tuple[str, ...], explain: str | None, as_json: bool) -> None:
    """Check FILE with its overrides and print it with all defaults; without FILE, list the sections."""
    if explain is not None:
        _explain(explain, as_json)
    elif file is None:
        _list("", as_json)
    else:
        from paceline.models.architectures import check_local_models
        from paceline.reward.builtin import check_rewards
        from paceline.spec.reading import load_spec, spec_to_yaml
        from paceline.user_code.definitions import check_code

        loaded = load_spec(file, overrides)
        check_rewards(loaded.rewards)
        check_code(loaded)
        check_local_models(loaded)
        if as_json:
            print_json(loaded.model_dump(mode="json"))
        else:
            click.echo(spec_to_yaml(loaded), nl=False)
        for warning in loaded.warnings:
            click.echo(f"warning: {warning}", err=True)


def _explain(name: str, as_json: bool) -> None:
    from paceline.spec.faults import unknown_key
    from paceline.spec.keys import keys

    if name in keys():
        _list(name, as_json)
        return
    below = [path for path in keys() if path.endswith(f".{name}")]
    if not below:
        raise NotFound("\n".join(unknown_key(tuple(name.split(".")), None)))
    for path in below:
        _list(path, as_json)


def _list(name: str, as_json: bool) -> None:
    from paceline.spec.keys import ITEM, keys, keys_of

    section = f"{name}.{ITEM}" if name and keys()[name].type_text == "list of sections" else name
    below = [f"{section}.{each}" if section else each for each in keys_of(section)]
    found = [keys()[path] for path in ([name] if name else []) + below]
    for key in found:
        if as_json:
            print_json(
                {"key": key.path, "type": key.type_text, "default": key.default_text, "description": key.description}
            )
            continue
        default = f", default {key.default_text}" if key.default_text not in ("", "required") else ""
        required = ", required" if key.default_text == "required" else ""
        click.echo(f"{key.path} ({key.type_text.replace('`', '')}{default}{required})\n    {key.description}")
