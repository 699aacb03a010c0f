"""lm-eval (EleutherAI's lm-evaluation-harness, 0.4): its command line for an endpoint, and its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from paceline.apps.evaluation.harnesses.scored import HarnessRun, ScoredSample
from paceline.errors import InvalidInput

PROGRAM = "lm_eval"
MODEL, CHAT = "local-completions", "local-chat-completions"
CONCURRENT = 8
"""Requests at one time."""


def command(url: str, model: str, tokenizer: str, folder: Path, arguments: Sequence[str]) -> list[str]:
    """Return its arguments: those of the user, with the endpoint's. `tokenizer` is a folder, because log-probabilities are
    requested by token ids. With `--model local-chat-completions` among the user's arguments it asks for chats."""
    given = list(arguments)
    kind = given[given.index("--model") + 1 :][:1] if "--model" in given else []
    if kind and kind[0] not in (MODEL, CHAT):
        raise InvalidInput(
            f"--model {kind[0]} after -- is not the endpoint; leave it out, or name {MODEL} or {CHAT}"
        )
    settings = {
        "model": model,
        "base_url": f"{url}/{'chat/completions' if kind == [CHAT] else 'completions'}",
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface",
        "num_concurrent": CONCURRENT,
        "max_retries": 3,
    }
    own = ["--model_args", json.dumps(settings), "--output_path", str(folder), "--log_samples"]
    return ["run", *([] if kind else ["--model", MODEL]), *own, *given]


def read(folder: Path) -> HarnessRun:
    """Return what the files in its output folder hold. Raises InvalidInput when it has left none."""
    files = sorted(folder.rglob("results_*.json"))
    if not files:
        raise InvalidInput("lm-eval has written no results; its output says why")
    found = json.loads(files[-1].read_text())
    samples = [each for path in sorted(folder.rglob("samples_*.jsonl")) for each in _samples(path)]
    return HarnessRun(str(found.get("lm_eval_version", "")), samples, found["results"])


def _samples(path: Path) -> Iterator[ScoredSample]:
    """Yield the samples of a task. The file has a line for each filter of a sample; their scores are put together."""
    task = path.stem.removeprefix("samples_").rpartition("_")[0]
    by_document: dict[int, list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        by_document.setdefault(row["doc_id"], []).append(row)
    for index, rows in sorted(by_document.items()):
        scores = {
            name if row["filter"] == "none" else f"{name},{row['filter']}": float(row[name])
            for row in rows
            for name in row.get("metrics", ())
            if isinstance(row.get(name), bool | int | float)
        }
        first = rows[0]
        requests = [each for _, each in sorted(first["arguments"].items(), key=_number)]
        choices = _choices(first["filtered_resps"])
        completion = (
            requests[max(range(len(choices)), key=lambda each: choices[each]["logprob"])]["arg_1"]
            if choices
            else str(first["filtered_resps"][0])
        )
        yield ScoredSample(task, index, 0, requests[0]["arg_0"], completion, scores, choices)


def _number(entry: tuple[str, Any]) -> int:
    return int(entry[0].rpartition("_")[2])


def _choices(responses: Any) -> list[dict[str, Any]]:
    """Return log-probability and greediness of each answer; nothing for a task that generates."""
    if not all(isinstance(each, list) and len(each) == 2 for each in responses):
        return []
    return [{"logprob": float(logprob), "is_greedy": str(greedy) == "True"} for logprob, greedy in responses]
