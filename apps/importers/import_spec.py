"""`paceline import trl|nemo|verl|prime-rl FILE`: write a spec from another library's configuration.

The spec is YAML that loads, below comments that list the settings left out. Configurations are read as their libraries
write them: YAML with `defaults` and `${…}`, TOML with `toml_files`, and overrides in a shell script.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import yaml

from paceline.apps.importers import nemo_rl, prime_rl, python_script, shell, trl, verl
from paceline.apps.importers.conversion import Conversion, flattened, listed, one_line_a_section, scalar
from paceline.errors import SpecError
from paceline.services.cli.render import FILE, PATH
from paceline.services.common.options import json_option, print_json
from paceline.spec.keys import keys_of
from paceline.spec.reading import apply_override, parse_spec, read_tree


@click.command("import")
@click.argument("library", type=click.Choice(["trl", "nemo", "verl", "prime-rl"]))
@click.argument("file", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
@click.option("-o", "--output", type=FILE, help="Spec to write; default NAME.paceline.yaml beside FILE.")
@click.option("--processes", default=1, type=click.IntRange(min=1), help="Number of GPUs of the TRL training.")
@click.option(
    "--command",
    default="",
    metavar="TEXT",
    help="Options of a TRL script that reads its settings from its command line.",
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@json_option
def import_spec(
    library: str,
    file: Path,
    overrides: tuple[str, ...],
    output: Path | None,
    processes: int,
    command: str,
    force: bool,
    as_json: bool,
) -> None:
    """Write a spec from FILE: a recipe or script of TRL, a YAML of NeMo RL, a YAML of verl or a script with verl's
    overrides, a TOML of prime-rl.

    A Python script is parsed, never run. Overrides are Paceline's keys; they complete or change the spec.
    """
    done = import_config(library, file, overrides, processes=processes, command=command)
    destination = output or file.with_name(f"{file.stem}.paceline.yaml")
    texts = {destination: spec_text(done, file)}
    texts |= {destination.with_name(name): text for name, text in done.files.items()}
    for path, text in texts.items():
        if path.exists() and not force:
            raise SpecError(f"{path} exists; name another with --output, or replace it with --force")
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise SpecError(f"cannot write {str(path)!r}: {error.strerror}; name another with --output") from None
    if as_json:
        print_json({"written": [str(path) for path in texts], "notes": done.notes, "left_out": done.left_out})
        return
    for title, lines in (("note", done.notes), ("left out", one_line_a_section(done.left_out))):
        for line in lines:
            click.echo(f"{title}: {line}", err=True)
    click.echo(f"{destination}: a spec for `paceline up`; {len(done.left_out)} settings were left out")


LIBRARIES = ("trl", "nemo", "verl", "prime-rl")
MAX_LINE = 200
REQUIRED = {
    "policy.model_name": "policy.model_name=…",
    "data.train": "data.train=…",
    "rewards": "'rewards=[{function: …}]'",
}
"""Keys that a configuration may lack, and the overrides that set them."""


def import_config(
    library: str, path: Path, overrides: tuple[str, ...] = (), *, processes: int = 1, command: str = ""
) -> Conversion:
    """Return the conversion of a file from `library`, one of LIBRARIES, with Paceline's overrides applied; its spec
    loads. `command` has the options of a TRL script that parses its command line.

    Raises SpecError if the file cannot be read, lacks a key that every spec needs, or has contradictory values.
    """
    if not path.is_file():
        raise SpecError(f"no file {str(path)!r}; name a configuration of {library}")
    if command and (library != "trl" or path.suffix != ".py"):
        raise SpecError("--command is only for a TRL script that parses its command line")
    done = _converted(library, path, processes, command)
    done.close()
    for override in overrides:
        apply_override(done.tree, override)
    _check_complete(done, path)
    try:
        parse_spec(done.tree, base=path.resolve().parent)
    except SpecError as error:
        raise SpecError(
            f"{path} gives a spec that does not load; correct it with overrides, such as section.key=value:\n{error}"
        ) from None
    return done


def spec_text(done: Conversion, source: Path) -> str:
    """Return the spec as YAML below comments: its source, notes, and the settings left out."""
    lines = [f"# From {source.name}, by `paceline import`."]
    lines += [f"# Note: {note}" for note in done.notes]
    lines += [f"# Left out: {line}" for line in one_line_a_section(done.left_out)]
    if done.left_out:
        lines.append("# `paceline spec --explain NAME` says why a name has no counterpart.")
    comments = "\n".join(_one_line(line) for line in lines)
    ordered = {name: done.tree[name] for name in keys_of("") if name in done.tree}
    body = yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=110, default_flow_style=None)
    return f"{comments}\n{body}"


def _converted(library: str, path: Path, processes: int, command: str = "") -> Conversion:
    try:
        if library == "trl" and path.suffix in (".py", ".sh"):
            script = (
                python_script.read_script(path, command)
                if path.suffix == ".py"
                else python_script.read_command(path.read_text(encoding="utf-8")[:MAX_BYTES], str(path))
            )
            done = trl.convert(script.settings, processes=processes, config=script.config)
            done.notes[:0] = script.notes
            done.files |= script.files
            return done
        if library == "trl":
            return trl.convert(read_yaml(path, "trl"), processes=processes)
        if library == "nemo":
            return nemo_rl.convert(read_yaml(path, "nemo_rl"), folder=path.resolve().parent)
        if library == "prime-rl":
            return prime_rl.convert(flattened(_with_files(path, "toml_files", _toml), "prime_rl"))
        if path.suffix in (".yaml", ".yml"):
            return verl.convert(read_yaml(path, "verl"))
        settings, notes = read_overrides(path)
        done = verl.convert(settings)
        done.notes[:0] = notes
        return done
    except UnicodeError:
        raise SpecError(f"{path} is not text in UTF-8; name a configuration of {library}") from None
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise SpecError(f"{path} has a value of another type than {library} reads: {error}") from None


def _check_complete(done: Conversion, path: Path) -> None:
    needs = [key for key in REQUIRED if key != "rewards" or done.algorithm in ("grpo", "distillation")]
    lacking = [key for key in needs if not _value(done.tree, key)]
    if lacking:
        raise SpecError(
            f"{path} gives no value for {' and '.join(lacking)}; add {' '.join(REQUIRED[key] for key in lacking)} to "
            "the command"
        )


def _value(tree: dict[str, Any], key: str) -> Any:
    node: Any = tree
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


def _one_line(text: str) -> str:
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 1]}…"


MAX_DEFAULTS = 8
"""Largest number of files in a chain of `defaults` or `toml_files`."""
MAX_BYTES = 1 << 20
_REFERENCE = re.compile(r"\$\{(\.*[A-Za-z_][\w.]*)\}")
_PRODUCT = re.compile(r"\$\{mul:\s*(\d+)\s*,\s*(\d+)\s*\}")
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]\w*\}?")
_OVERRIDE = re.compile(r"^[+~]{0,2}([A-Za-z_][\w.]*)=(.*)$", re.S)


def read_yaml(path: Path, library: str) -> dict[str, Any]:
    settings = flattened(_with_files(path, "defaults", read_tree), library)
    return {name: _resolved(value, name, settings) for name, value in settings.items()}


def read_overrides(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the `section.key=value` words of a shell script, and a note for each value that is known only while the
    script runs. Raises SpecError."""
    found: dict[str, Any] = {}
    notes = []
    for command in shell.commands(path.read_text(encoding="utf-8")[:MAX_BYTES]):
        for word in command:
            match = _OVERRIDE.match(word)
            if not match or "." not in match[1]:
                if _VARIABLE.fullmatch(word):
                    notes.append(f"only a run of the script knows whether {word} has more settings; set them by hand")
                continue
            if unknown := shell.unresolved(match[2]):
                notes.append(f"{match[1]} is {match[2]}, and only a run of the script knows {unknown}; set it by hand")
            else:
                found[match[1]] = scalar(match[2])
    if not found:
        raise SpecError(f"{path} has no override such as data.train_files=train.parquet; name the YAML or the script")
    return found, list(dict.fromkeys(notes))


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")[:MAX_BYTES])
    except OSError as error:
        raise SpecError(f"cannot read {str(path)!r}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError(f"{path} is not TOML: {error}") from None


def _with_files(
    path: Path, key: str, read: Callable[[Path], dict[str, Any]], files_left: int = MAX_DEFAULTS
) -> dict[str, Any]:
    """Return the tree of a file. Its `key` (`defaults` or `toml_files`) names files with the values that the tree
    lacks."""
    tree = read(path)
    below: dict[str, Any] = {}
    for name in listed(tree.pop(key, None)):
        if key == "defaults" and (not isinstance(name, str) or name == "_self_"):
            continue
        if files_left == 0:
            raise SpecError(
                f"{path}: the chain of {key} has more than {MAX_DEFAULTS} files; write the settings into one"
            )
        below = _merged(below, _with_files(path.parent / str(name), key, read, files_left - 1))
    return _merged(below, tree)


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), dict) and not value.get("_override_"):
            merged[key] = _merged(merged[key], value)
        else:
            merged[key] = {k: v for k, v in value.items() if k != "_override_"} if isinstance(value, Mapping) else value
    return merged


def _resolved(value: Any, name: str, settings: Mapping[str, Any], levels: int = 8) -> Any:
    """Return a value with its references resolved; None for a reference to an unknown name."""
    if isinstance(value, list):
        return [_resolved(each, name, settings, levels) for each in value]
    if not isinstance(value, str) or "${" not in value or levels == 0:
        return value

    def fill(match: re.Match[str]) -> str:
        target = _absolute(match[1], name)
        found = _resolved(settings.get(target), target, settings, levels - 1)
        return "null" if found is None else str(found)

    filled = _PRODUCT.sub(lambda match: str(int(match[1]) * int(match[2])), _REFERENCE.sub(fill, value))
    return None if "${" in filled else scalar(filled)


def _absolute(reference: str, name: str) -> str:
    """Return the dotted name that OmegaConf's reference in setting `name` means: one leading dot for the setting's
    section, each further dot for the section above."""
    rest = reference.lstrip(".")
    dots = len(reference) - len(rest)
    return ".".join([*name.split(".")[:-dots], rest]) if dots else rest
