"""inspect-ai (the UK AI Security Institute's Inspect, 0.3): its command line for an endpoint, and its logs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.apps.evaluation.harnesses.scored import HarnessRun, ScoredSample
from paceline.errors import InvalidInput

PROGRAM = "inspect"
SERVICE = "paceline"
"""Name of the endpoint in `openai-api/<name>/<model>`, of which its variables are made."""
LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
"""Inspect's values for correct, incorrect, partial and no answer, as its own `accuracy` counts them."""


def command(url: str, model: str, tokenizer: str, folder: Path, arguments: Sequence[str]) -> list[str]:
    """Return its arguments: those of the user, with the endpoint's; the URL is in `variables`."""
    own = ["--model", f"openai-api/{SERVICE}/{model}", "--log-dir", str(folder), "--log-format", "json"]
    return ["eval", *arguments, *own, "--display", "plain"]


def variables(url: str) -> dict[str, str]:
    """Return the environment variables that name the endpoint. A served model takes any key."""
    return {f"{SERVICE.upper()}_BASE_URL": url, f"{SERVICE.upper()}_API_KEY": "none"}


def read(folder: Path) -> HarnessRun:
    """Return what its logs hold. Raises InvalidInput when there is none, or one of a run that failed."""
    logs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not logs:
        raise InvalidInput("inspect has written no log; its output says why")
    for log in logs:
        if log["status"] != "success":
            message = (log.get("error") or {}).get("message", "")
            raise InvalidInput(f"inspect's task {log['eval']['task']} ended with {log['status']}: {message}")
    samples = [sample for log in logs for sample in _samples(log)]
    results = {log["eval"]["task"]: log.get("results") for log in logs}
    return HarnessRun(str(logs[0]["eval"]["packages"].get("inspect_ai", "")), samples, results)


def _samples(log: dict[str, Any]) -> Iterator[ScoredSample]:
    task = str(log["eval"]["task"])
    numbers: dict[Any, int] = {}
    for row in log.get("samples") or ():
        index = numbers.setdefault(row["id"], len(numbers))
        scores = {
            name: value
            for scorer, score in (row.get("scores") or {}).items()
            for name, value in _values(scorer, score["value"])
        }
        completion = str((row.get("output") or {}).get("completion", ""))
        yield ScoredSample(task, index, int(row["epoch"]) - 1, row["input"], completion, scores)


def _values(scorer: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield names and numbers of a score; what is no number is left out."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _values(f"{scorer}/{name}", each)
    elif isinstance(value, bool | int | float):
        yield scorer, float(value)
    elif value in LETTERS:
        yield scorer, LETTERS[value]
