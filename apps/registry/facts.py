"""Presents registered models as plain values, for --json and for people."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from paceline.errors import counted
from paceline.models.evaluation_results import has_passed, outcome_of

if TYPE_CHECKING:
    from paceline.v1.registry_pb2 import ModelChange, RegisteredModel

PLAIN = (
    *("name", "version", "stage", "override", "run_id", "chain", "path", "export_sha256", "statement_sha256"),
    *("spec_sha256", "data", "code", "parent", "registered_by", "registered_s"),
)
CHANGE = ("sequence", "kind", "alias", "version", "previous", "reason", "caller", "changed_s")


def model_facts(model: RegisteredModel) -> dict[str, Any]:
    return {name: getattr(model, name) for name in PLAIN} | {
        "session": model.policy.session,
        "step": model.policy.step,
        "aliases": list(model.aliases),
        "evaluations": [json.loads(each) for each in model.evaluations_json],
        "verdicts": [json.loads(each) for each in model.verdicts_json],
    }


def change_facts(change: ModelChange) -> dict[str, Any]:
    return {name: getattr(change, name) for name in CHANGE}


def model_lines(model: RegisteredModel) -> list[str]:
    trained = f"run {model.run_id}, {counted(model.policy.step, 'step')}" if model.run_id else "from elsewhere"
    verdicts = [json.loads(each) for each in model.verdicts_json]
    lines = [
        f"{model.name}:{model.version}  {model.stage}  {' '.join(f'@{alias}' for alias in model.aliases)}".rstrip(),
        f"  trained    {trained}",
        f"  chain      {model.chain or '-'}",
        f"  parent     {model.parent or '-'}",
        f"  files      {model.path}",
        f"  export     {model.export_sha256}",
        f"  statement  {model.statement_sha256}",
        f"  gate       {outcome_of(verdicts)}",
    ]
    for text in model.evaluations_json:
        found = json.loads(text)
        lines.append(f"  evaluation {found.get('name', '')} {found['digest']}")
        lines += [f"    {name:32} {each['value']:.4f}" for name, each in found["metrics"].items()]
    if model.override:
        lines.append(f"  promoted past its gate: {model.override}")
    return lines


def change_line(change: ModelChange) -> str:
    """Return a line about a change of an alias, with its time (UTC)."""
    why = f": {change.reason}" if change.reason else ""
    by = f" by {change.caller}" if change.caller else ""
    former = f"from {change.previous} " if change.previous else ""
    time = datetime.fromtimestamp(change.changed_s, UTC)
    return f"  {time:%Y-%m-%d %H:%M} {change.kind} @{change.alias} {former}to {change.version}{by}{why}"


def stage_fault(model: RegisteredModel, stage: str) -> str:
    """Return why a version, with its evidence, has not reached a stage; empty if it has."""
    if model.stage == "rolled_back":
        return "it was rolled back"
    if stage == "promoted" and model.stage != "promoted":
        return f"it is {model.stage}"
    if stage == "passed" and not has_passed([json.loads(each) for each in model.verdicts_json]):
        if model.override:
            return f"it was promoted past its gate ({model.override}); --stage promoted takes such versions"
        return f"its gate says: {outcome_of([json.loads(each) for each in model.verdicts_json])}"
    return ""
