"""Models that a spec names as `run:ID`: another run's export, which is looked for when the run is submitted.

`run:ID` is the final export of that run, else its newest export by step; `run:ID/NAME` is the export of that name. The stored
spec has the folder or URL, so that workers, later sessions and replays read the same files. A reward model may be named so
too, and as `run:ID/newest`: the folder of the exports, in which its process finds the newest one whenever it looks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.errors import NotFound, SpecError
from paceline.files.names import EXPORTS
from paceline.files.storage import Folder
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec import RewardFunctionSection, RunSpec
from paceline.spec.reading import MODEL_FIELDS, parse_spec, spec_of_run

PREFIX = "run:"
NEWEST = "newest"
"""Name of the export that is the newest by step, whenever a reward model is read."""
OF_STEP = re.compile(r"step-(\d{1,18})")
MAX_NAMED = 8
"""Runs that a message names."""


@dataclass(frozen=True)
class Reference:
    """A reference to a run's export, with the folders and URLs where it may be."""

    field: str
    value: str
    final: str
    """Final export; empty while there is none."""
    exports: str
    """Parent folder of the exports by name."""
    name: str
    missing: str
    """Sentence for an export that is not there."""
    follows: bool = False
    """True for the folder of the exports itself, in which the newest is looked for again and again."""


def references(spec: RunSpec, ledger: Ledger) -> list[Reference]:
    """Return the references of a spec. It reads the ledger alone. Raises SpecError for a run that does not exist, that has
    trained a scoring head where a language model is needed, or for data."""
    for field in ("train", "validation"):
        names = getattr(spec.data, field)
        for name in (names,) if isinstance(names, str) else names or ():
            if name.startswith(PREFIX):
                run_id = name.removeprefix(PREFIX)
                raise SpecError(
                    f"data.{field} {name!r}: a run's export is a model; `paceline samples export {run_id} FILE.jsonl` writes "
                    "the run's samples as data"
                )
    return [_reference(field, value, ledger) for field, value in _named(spec)]


def _named(spec: RunSpec) -> Iterator[tuple[str, str]]:
    for section, key in MODEL_FIELDS:
        value = getattr(getattr(spec, section), key)
        if value is not None and value.startswith(PREFIX):
            yield f"{section}.{key}", value
    for index, reward in enumerate(spec.rewards):
        argument = RewardFunctionSection.PATH_ARGUMENTS.get(reward.function)
        value = reward.kwargs.get(argument) if argument is not None else None
        if isinstance(value, str) and value.startswith(PREFIX):
            yield f"rewards.{index}.kwargs.{argument}", value


def _reference(field: str, value: str, ledger: Ledger) -> Reference:
    run_id, _, name = value.removeprefix(PREFIX).partition("/")
    try:
        row = ledger.run(run_id)
    except NotFound:
        raise SpecError(
            f"{field} {value!r}: there is no run {run_id!r} here; {_with_exports(ledger)}"
        ) from None
    has_scoring_head, rewards = (
        spec_of_run(run_id, row["spec_yaml"])[0].has_scoring_head,
        field.startswith("rewards."),
    )
    if rewards and not has_scoring_head:
        raise SpecError(
            f"{field} {value!r}: run {run_id} has trained a language model; name a run with algorithm rm, whose export gives "
            "scores"
        )
    if field != "value.model_name" and has_scoring_head and not rewards:
        raise SpecError(
            f"{field} {value!r}: run {run_id} has trained a reward model, which writes no text; name a run that has trained a "
            "language model"
        )
    state = f"it is {row['state']} at step {row['next_step']} of {row['max_num_steps']}"
    what = f"has no export {name!r}" if name else "has exported no model"
    missing = (
        f"{field} {value!r}: run {run_id} {what} ({state}); `paceline export {run_id}` writes one from its newest checkpoint. "
        f"{_with_exports(ledger)}"
    )
    exports = f"{ledger.run_store(run_id)}/{EXPORTS}"
    if rewards and name == NEWEST:
        return Reference(field, value, "", exports, "", missing, follows=True)
    return Reference(field, value, "" if name else ledger.export_path(run_id), exports, name, missing)


def _with_exports(ledger: Ledger) -> str:
    known = [str(row["run_id"]) for row in ledger.runs() if ledger.export_path(row["run_id"])]
    named = ", ".join(known[-MAX_NAMED:])
    return f"runs with exports: {named}" if known else "no run has an export yet"


def located(reference: Reference) -> str:
    """Return the folder or URL of an export. Reads the store. Raises SpecError when it is not there or cannot be read."""
    try:
        for place in _places(reference):
            if Folder(place).exists("config.json"):
                return reference.exports if reference.follows else place
    except Exception as error:  # the clients of object stores raise errors without a common base
        raise SpecError(
            f"{reference.field} {reference.value!r} cannot be read in {reference.final or reference.exports}: "
            f"{type(error).__name__}: {error}; correct the store's name or credentials, or submit again when it is back"
        ) from None
    raise SpecError(reference.missing)


def _places(reference: Reference) -> Iterator[str]:
    if reference.name:
        yield f"{reference.exports}/{reference.name}"
        return
    if reference.final:
        yield reference.final
    steps = {folder.name: OF_STEP.fullmatch(folder.name) for folder in Folder(reference.exports).folders()}
    for _, name in sorted(((int(match[1]), name) for name, match in steps.items() if match), reverse=True):
        yield f"{reference.exports}/{name}"


def with_locations(
    spec: RunSpec, found: list[Reference], locate: Callable[[Reference], str] = located
) -> RunSpec:
    """Return the spec with folders and URLs in place of references. Raises SpecError."""
    if not found:
        return spec
    tree: dict[str, Any] = spec.model_dump(mode="json")
    for reference in found:
        *sections, key = reference.field.split(".")
        node: Any = tree
        for section in sections:
            node = node[int(section)] if isinstance(node, list) else node[section]
        node[key] = locate(reference)
    return parse_spec(tree)
