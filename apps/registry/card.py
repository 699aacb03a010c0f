"""The model card of a registered model: front matter that the hub reads, evaluations, and where the model comes from. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.apps.registry.statement import Lineage
from paceline.files.names import STATEMENT
from paceline.models.evaluation_results import outcome_of

Json = Mapping[str, Any]


def card_text(
    name: str,
    version: int,
    lineage: Lineage,
    base_model: str,
    evaluations: Sequence[Json],
    verdicts: Sequence[Json],
    earlier: str = "",
) -> str:
    """Return the card's text, which ends with the `earlier` text of the export's own card."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type="text-generation",
            dataset_type=each.get("name", "evaluation"),
            dataset_name=each.get("name", "evaluation"),
            metric_type=metric,
            metric_value=found["value"],
            metric_name=metric,
        )
        for each in evaluations
        for metric, found in each["metrics"].items()
    ]
    data = ModelCardData(
        model_name=name,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["paceline", "reinforcement-learning"],
        eval_results=results or None,
        base_model=base_model or None,
    )
    lines = [*_body(name, version, lineage, evaluations, verdicts), *_earlier(earlier)]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines)


def _body(
    name: str, version: int, lineage: Lineage, evaluations: Sequence[Json], verdicts: Sequence[Json]
) -> list[str]:
    lines = [f"# {name}, version {version}", ""]
    if lineage.run_id:
        lines += [
            f"Trained by Paceline in the run `{lineage.run_id}`, session {lineage.session}, {lineage.step} steps.",
            "",
            f"- chain of its batches: `{lineage.chain or 'none (a run on examples)'}`",
            f"- SHA-256 of its spec: `{lineage.spec_sha256}`",
            f"- fingerprint of its data: `{lineage.data or 'not on record'}`",
            *(
                []
                if lineage.named_by_files
                else ["- named by whoever registered the files, which name no run"]
            ),
            "",
        ]
    for each in evaluations:
        lines += [
            f"## Evaluation {each.get('name', '')}",
            "",
            "| metric | value | 95 % interval |",
            "|---|---|---|",
        ]
        lines += [
            f"| {metric} | {found['value']:.4f} | {found['low']:.4f} to {found['high']:.4f} |"
            for metric, found in each["metrics"].items()
        ]
        lines += [
            "",
            f"{each['problems']} problems, {each['k']} completions each, digest `{each['digest']}`.",
            "",
        ]
    lines += [
        f"Gate: {outcome_of(list(verdicts))}.",
        *(f"- {r}" for v in verdicts for r in v.get("reasons", ())),
        "",
    ]
    return [*lines, f"`{STATEMENT}` names every file's SHA-256 and every batch of the run.", ""]


def _earlier(text: str) -> list[str]:
    """Return the text of the export's own card, without its front matter, under a heading."""
    from huggingface_hub import ModelCard

    if not text.strip():
        return []
    return [
        "## Card of the exported folder",
        "",
        ModelCard(text, ignore_metadata_errors=True).text.strip(),
        "",
    ]
