"""Prints the output of the commands: tables and lines of up to 100 columns, which are made from facts. `--json` prints
the same facts, so text and JSON never disagree. rich is imported only when a table is printed."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paceline.errors import counted
from paceline.services.common.options import print_json
from paceline.services.common.reporting.terminal import scaled, sparkline, visible

if TYPE_CHECKING:
    from paceline.v1.run_pb2 import Run
    from paceline.v1.worker_pb2 import Member

Facts = dict[str, Any]
FILE = click.Path(path_type=Path, dir_okay=False)
FOLDER = click.Path(path_type=Path, file_okay=False)
PATH = click.Path(path_type=Path)

RUN_FACTS = (
    *("run_id", "state", "message", "step", "max_num_steps", "directory", "groups", "tokens", "age_s"),
    *("warnings", "priority", "queue_place"),
)
RUN_COLUMNS = ("run", "state", "steps", "open groups", "trained tokens", "age", "message")
MEMBER_COLUMNS = ("member", "role", "address", "http", "version", "session", "holds", "silent")
STYLES = {"warning": "yellow", "evaluation": "green", "state": "bold", "session": "cyan", "member": "cyan"}
"""Colour of an event's line on a terminal, by kind."""

STEP_COLUMNS = 80
MESSAGE_COLUMNS = 48
CURVE_COLUMNS = 40

VERBS = {"succeeded": "has", "failed": "has", "cancelled": "was"}


def run_facts(run: Run) -> Facts:
    from paceline.client import state_name

    converted = {"state": state_name(run), "groups": dict(run.groups), "tokens": dict(run.tokens)}
    return {name: getattr(run, name) for name in RUN_FACTS} | converted | {"warnings": list(run.warnings)}


def run_row(facts: Facts) -> list[str]:
    from paceline.services.coordinator.ledger.groups import OPEN_STATES

    opened = sum(facts["groups"].get(state, 0) for state in OPEN_STATES)
    return [
        facts["run_id"],
        state_cell(facts),
        f"{facts['step']}/{facts['max_num_steps']}",
        str(opened),
        f"{facts['tokens'].get('trained', 0):,}" if any(facts["tokens"].values()) else "-",
        duration(facts["age_s"]),
        facts["message"] if len(facts["message"]) <= MESSAGE_COLUMNS else f"{facts['message'][:MESSAGE_COLUMNS]} …",
    ]


def long_messages(runs: Sequence[Facts]) -> Iterator[str]:
    """Yield lines with the full text of each message that is cut off in its run's row."""
    for facts in runs:
        if len(facts["message"]) > MESSAGE_COLUMNS:
            yield f"{facts['run_id']}:"
            words = visible(facts["message"])
            yield textwrap.fill(
                words, 100, initial_indent="  ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )


def state_cell(facts: Facts) -> str:
    """Return the state of a run, with its place in the queue and its priority if these are not the defaults."""
    notes = [f"#{facts['queue_place']}"] if facts["queue_place"] else []
    notes += [f"priority {facts['priority']}"] if facts["priority"] else []
    return f"{facts['state']} ({', '.join(notes)})" if notes else str(facts["state"])


def member_facts(member: Member) -> Facts:
    """Return the facts of a member; `version` is null until the member has acknowledged a version."""
    from paceline.v1.common_pb2 import Role

    version = {"session": member.version.session, "step": member.version.step}
    return {
        "member_id": member.member_id,
        "role": Role.Name(member.role).removeprefix("ROLE_").lower(),
        "address": member.address,
        "http_address": member.http_address,
        "version": version if member.HasField("version") else None,
        "silent_s": member.silent_s,
        "held": member.held,
    }


def member_row(facts: Facts) -> list[str]:
    version = facts["version"] or {"step": "", "session": ""}
    return [
        facts["member_id"],
        facts["role"],
        facts["address"],
        facts["http_address"],
        str(version["step"]),
        str(version["session"]),
        str(facts["held"]),
        f"{facts['silent_s']:.1f} s",
    ]


def event_line(kind: str, content: Mapping[str, Any]) -> str:
    """Return one line for an event of a run. Messages can quote texts of models, so they are printed without markup."""
    return visible(_event_line(kind, content))


def _event_line(kind: str, content: Mapping[str, Any]) -> str:
    match kind:
        case "step":
            return step_line(content)
        case "evaluation" if "reward" not in content:
            measured = ("loss", "accuracy", "margin")
            shown = [f"{name} {_number(content[name], '.4f')}" for name in measured if name in content]
            return f"validation of version {content['step']}: {', '.join(shown)}"
        case "evaluation":
            return _evaluation_line(content)
        case "state":
            message = f": {content['message']}" if content.get("message") else ""
            return f"the run {VERBS.get(content['state'], 'is')} {content['state']}{message}"
        case "session":
            where = f" at step {content['step']}" if content.get("step") else ""
            return f"learner session {content['session']} begins{where} and loads the model"
        case "member":
            return f"{content['member_id']} ({content['role']}) {content['what']}"
        case "checkpoint":
            when = f"after step {content['step'] - 1}" if content["step"] else "before the first step"
            return f"checkpoint {when} in {content['seconds']:.1f} s: {content['path']}"
        case "warning":
            return f"warning: {content['message']}"
    return f"{kind}: {json.dumps(content)}"


def step_line(metrics: Mapping[str, Any]) -> str:
    """Return a line of at most STEP_COLUMNS for a trained step; parts at its end are left out if they do not fit. A run
    with rollouts shows its reward even in a step in which no function gave a reward."""
    parts = [f"step {metrics['step']:>4}"]
    if "reward" in metrics or "completion_length" in metrics:
        parts.append(f"reward {_number(metrics.get('reward'), '6.3f')}")
    elif "loss" in metrics:
        parts.append(f"loss {_number(metrics['loss'], '7.4f')}")
        parts += [f"accuracy {_number(metrics['accuracy'], '5.3f')}"] if "accuracy" in metrics else []
    if "completion_length" in metrics:
        parts.append(f"len {_number(metrics['completion_length'], '4.0f')}")
    if metrics.get("rollout/tokens_per_s"):  # 0 in a step that trains groups of earlier steps alone
        parts.append(f"{_number(metrics['rollout/tokens_per_s'], '5.0f')} tok/s")
    if "step_s" in metrics:
        parts.append(f"train {_number(metrics['step_s'], '3.1f')}s")
    if "learner_wait_s" in metrics:
        parts.append(f"wait {_number(metrics['learner_wait_s'], '3.1f')}s")
    ages = {int(key.removeprefix("age/")): n for key, n in metrics.items() if key.startswith("age/") and n}
    if ages:
        mean = sum(age * n for age, n in ages.items()) / sum(ages.values())
        parts.append(f"age {mean:.1f}")
    while len("  ".join(parts)) > STEP_COLUMNS:
        parts.pop()
    return "  ".join(parts)


def _evaluation_line(content: Mapping[str, Any]) -> str:
    when = "before training" if content["step"] == 0 else f"after step {content['step'] - 1}"
    parts = [f"reward {_with_error(content, 'reward', 'reward_stderr')}"]
    names = [name.removeprefix("reward/") for name in content if name.startswith("reward/")]
    if len(names) > 1:
        parts += [f"{name} {_with_error(content, f'reward/{name}', f'reward_stderr/{name}')}" for name in names]
    parts += [f"{name} {_number(value, '.3f')}" for name, value in content.items() if name.startswith("pass@")]
    parts.append(counted(content.get("prompts", content.get("samples", 0)), "prompt"))
    parts += [f"{content['failed']} failed"] if content.get("failed") else []
    parts.append(f"length {_number(content.get('completion_length'), '.1f')}")
    return f"evaluation of version {content['step']} ({when}): {', '.join(parts)}"


def _with_error(content: Mapping[str, Any], name: str, error: str) -> str:
    margin = f" ± {_number(content[error], '.3f')}" if error in content else ""
    return _number(content.get(name), ".3f") + margin


def outcome(
    facts: Facts,
    evaluations: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    values: Sequence[float] = (),
    measure: str = "reward",
) -> str:
    """Return the last lines about a run. `evaluations` are the contents of its evaluation events, oldest first.
    `values` are the rewards or the losses of the steps; `measure` says which."""
    tokens = facts["tokens"]
    lines = [
        f"{facts['run_id']} {facts['state']} after {facts['step']} of {counted(facts['max_num_steps'], 'step')}"
        + (f": {visible(facts['message'])}" if facts["message"] else "")
    ]
    if any(tokens.values()):  # the token accounting of a run on examples is empty
        lines.append(
            f"tokens: {tokens.get('trained', 0):,} trained, {tokens.get('dropped', 0):,} dropped, "
            f"{tokens.get('wasted', 0):,} wasted"
        )
    dropped = {
        name.removeprefix("dropped:"): number
        for name, number in facts["groups"].items()
        if name.startswith("dropped:") and number and name != "dropped:run_ended"
    }
    if dropped:
        lines.append(f"groups dropped: {', '.join(f'{n:,} {reason}' for reason, n in dropped.items())}")
    if len(values) > 1:
        curve = sparkline(scaled(list(values)), CURVE_COLUMNS)
        lines.append(f"{measure} of the steps: {curve}  {values[0]:.3f} to {values[-1]:.3f}")
    for name in ("reward", "accuracy", "loss"):
        results = [content[name] for content in evaluations if content.get(name) is not None]
        if len(results) > 1:
            lines.append(f"evaluation {name}: {results[0]:.3f} at first, {results[-1]:.3f} at last")
    if summary.get("export_path"):
        lines.append(f"model: {summary['export_path']}")
    return "\n".join(lines)


def sample_text(group: Mapping[str, Any], *, of_evaluation: bool = False) -> str:
    """Return a group as text: the prompt, then each completion with its rewards, tokens and versions."""
    prompt = group["prompt"]
    if not isinstance(prompt, str):
        prompt = "\n".join(f"[{message['role']}] {message['content']}" for message in prompt)
    lines = [
        f"── group {group['group_id'] & 0xFFFFF} · version {group['step']} · reward {_number(group['reward'], '.3f')}"
        if of_evaluation
        else f"── group {group['group_id']} · step {group['step']} · reward {_number(group['reward'], '.3f')}",
        prompt,
    ]
    for completion in group["completions"]:
        rewards = ", ".join(f"{name} {_number(value, '.3g')}" for name, value in completion["rewards"].items())
        versions = "→".join(str(step) for _, _, _, step in completion["spans"])
        tokens = len(completion["token_ids"])
        if "messages" in completion:
            lines.append(f"  ▸ {rewards} · {_episode_line(completion)} · version {versions}")
            lines += [f"    {line}" for line in _conversation(completion)]
        else:
            lines.append(f"  ▸ {rewards} · {tokens} tokens ({completion['finish_reason']}) · version {versions}")
            lines += [f"    {line}" for line in completion["text"].splitlines() or [""]]
        lines += [f"    {name}: {value}" for name, value in completion.get("extra", {}).items()]
    return visible("\n".join(lines))


def _episode_line(episode: Mapping[str, Any]) -> str:
    read = sum(row["sampled"].count(0) for row in episode["rows"])
    detail = f": {episode['detail']}" if episode["detail"] else ""
    return (
        f"{episode['ending']}{detail} · {counted(len(episode['turns']), 'turn')} in {counted(len(episode['rows']), 'row')} · "
        f"{counted(len(episode['token_ids']), 'token')} sampled, {read} read"
    )


def _conversation(episode: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a conversation; text that the model did not write, which the learner masks, is behind a
    bar."""
    prompt = episode["prompt"]  # `reset` returned it, so it is in this episode's prompt alone
    opening = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt or []
    for message in [*opening, *episode["messages"]]:
        by_model = message.get("role") == "assistant"
        content = message.get("content")
        text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
        mark = "" if by_model else "│ "
        first, *rest = text.splitlines() or [""]
        yield f"{mark}[{message.get('role')}] {first}".rstrip()
        yield from (f"{mark}{line}" for line in rest)
        for call in message.get("tool_calls") or ():
            function = call.get("function", {})
            yield f"{mark}→ {function.get('name')}({function.get('arguments')})"


def verify_text(run_id: str, problems: Sequence[str], facts: Mapping[str, Any]) -> str:
    """Return the findings of `ledger verify`: each problem on a line, then a summary of the comparisons."""
    compared = [f"  {name}: {value if isinstance(value, str) else json.dumps(value)}" for name, value in facts.items()]
    head = f"{counted(len(problems), 'problem')} in {run_id}:" if problems else f"{run_id}: all records agree"
    return "\n".join([head, *(f"  ✗ {visible(problem)}" for problem in problems), *compared])


def answer(as_json: bool, facts: Any, text: str) -> None:
    if as_json:
        print_json(facts)
    else:
        click.echo(text)


def print_all(
    as_json: bool, facts: Sequence[Facts], columns: Sequence[str], row: Callable[[Facts], list[str]], empty: str
) -> None:
    if not as_json:
        print_table(columns, [row(each) for each in facts], empty=empty)
    for each in facts if as_json else ():
        print_json(each)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str) -> None:
    """Print a table on stdout, or `empty` for an empty table. If the output is not a terminal, cells are never cut."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        print(empty)
        return
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    if sys.stdout.isatty():
        Console().print(table, highlight=False)
        return
    console = Console(width=400)
    with console.capture() as printed:
        console.print(table, highlight=False)
    print("\n".join(line.rstrip() for line in printed.get().splitlines()))  # one long cell pads no other row


def duration(seconds: float) -> str:
    """Return a length of time for people: 8 s, 3 min 20 s, 2 h 5 min, 3 d 4 h."""
    whole = int(seconds)
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // part_s} {part}"
    return f"{whole} s"


def _number(value: Any, form: str) -> str:
    """Return a number in `form`, or a dash of the same width if it is unknown."""
    if isinstance(value, int | float) and math.isfinite(value):
        return format(value, form)
    return "-".rjust(int(form.split(".")[0] or 1))
