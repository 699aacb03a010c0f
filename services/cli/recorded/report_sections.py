"""The sections of `paceline report` beside its curves. Pure: every text is escaped, with control characters written out."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline import __version__
from services.common.reporting.visible_text import visible

if TYPE_CHECKING:
    from paceline.records import Verified
    from protos.paceline.v1.records_pb2 import GetBooksResponse, RecordedCheckpoint, SpecKey

STYLE = """
table { border-collapse: collapse; font-size: 14px; } th { text-align: left; color: #555; font-weight: normal; }
th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid #ddd; vertical-align: top; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; unicode-bidi: isolate; margin: 0; max-height: 30em; overflow: auto; }
pre, code { font: 13px ui-monospace, monospace; } .bad { color: #a40000; } .good { color: #2e7d32; }
"""
MAX_TEXT = 20_000
"""Characters of a completion that are shown."""


class Report(NamedTuple):
    """What a report shows beside its curves."""

    facts: dict[str, Any]
    books: GetBooksResponse
    spec: Sequence[SpecKey]
    spec_yaml: str
    checkpoints: Sequence[RecordedCheckpoint]
    warnings: Sequence[str]
    samples: Sequence[dict[str, Any]]
    """Groups, each with one `completion`, the best first."""
    verified: Verified | None


def head(report: Report) -> str:
    """Return what stands before the curves: outcome and books."""
    facts, books = report.facts, report.books
    message = f'<p class="bad">{escape(facts["message"])}</p>' if facts["message"] else ""
    balance = (
        '<span class="good">balanced</span>' if books.balanced else '<span class="bad">not balanced</span>'
    )
    dropped = _table(("dropped because", "tokens"), sorted(books.dropped_by_reason.items()))
    return (
        f"<h1>{escape(facts['run_id'])}</h1><p>{escape(facts['state'])} after {facts['step']:,} of "
        f"{facts['max_num_steps']:,} steps. Report by Paceline {escape(__version__)}.</p>{message}"
        f"<p><b>{books.generated:,}</b> tokens generated = <b>{books.trained:,}</b> trained + <b>{books.dropped:,}</b> dropped"
        f" + <b>{books.live:,}</b> live ({balance}); {books.wasted:,} wasted.</p>{dropped}{_verified(report.verified)}"
    )


def sections(report: Report) -> str:
    """Return what stands after the curves: samples, warnings, checkpoints, spec."""
    checkpoints = [(each.step, each.session, each.path, each.sha256) for each in report.checkpoints]
    differing = [
        (key.path, key.value_json, key.default, key.description) for key in report.spec if key.differs
    ]
    warnings = "".join(f"<li>{escape(text)}</li>" for text in report.warnings)
    parts = {
        "Best and worst completions of the last step": "".join(map(_sample, report.samples)),
        "Warnings": f"<ul>{warnings}</ul>" if warnings else "",
        "Checkpoints": _table(("steps", "session", "folder", "SHA-256 of the manifest"), checkpoints),
        "Spec: what differs from the defaults": _table(("key", "value", "default", "meaning"), differing),
        "Spec": f"<details><summary>as YAML</summary><pre>{escape(report.spec_yaml)}</pre></details>",
    }
    return "".join(f"<h2>{title}</h2>{content}" for title, content in parts.items() if content)


def escape(text: object) -> str:
    """Return a text for HTML that is only text there."""
    return html.escape(visible(str(text)))


def _sample(group: dict[str, Any]) -> str:
    completion, prompt = group["completion"], group["prompt"]
    if not isinstance(prompt, str):
        prompt = "\n".join(f"[{message.get('role')}] {message.get('content')}" for message in prompt)
    text = completion["text"]
    if "messages" in completion:
        text = json.dumps(completion["messages"], indent=1, ensure_ascii=False)
    rewards = ", ".join(f"{name} {_number(value)}" for name, value in completion["rewards"].items())
    return (
        f"<h3>reward {_number(completion['reward'])} ({escape(rewards)}), {len(completion['token_ids'])} tokens, "
        f"{escape(completion['finish_reason'])}; group {group['group_id']} of step {group['step']}</h3>"
        f"<table><tr><th>prompt</th><td><pre>{_cut(prompt)}</pre></td></tr>"
        f"<tr><th>completion</th><td><pre>{_cut(text)}</pre></td></tr></table>"
    )


def _cut(text: str) -> str:
    left_out = f"\n… {len(text) - MAX_TEXT:,} characters more" if len(text) > MAX_TEXT else ""
    return escape(text[:MAX_TEXT]) + left_out


def _verified(verified: Verified | None) -> str:
    if verified is None:
        return ""
    if not verified.problems:
        return '<p class="good">All records agree (paceline ledger verify).</p>'
    items = "".join(f"<li>{escape(problem)}</li>" for problem in verified.problems)
    return f'<p class="bad">{len(verified.problems)} problems (paceline ledger verify):</p><ul>{items}</ul>'


def _table(columns: Iterable[str], rows: Sequence[Sequence[object]]) -> str:
    if not rows:
        return ""
    first = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{first}</tr>{lines}</table>"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"
