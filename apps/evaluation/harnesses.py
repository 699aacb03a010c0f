"""Runs external harnesses on a served model (`paceline eval --with`) and converts their scores to a result.

lm-eval is EleutherAI's lm-evaluation-harness (0.4), and inspect-ai is the UK AI Security Institute's Inspect (0.3).

Promise: a harness gets the model's URL and nothing of this process's Python environment, and the harness ends when this
process is told to end. Scores are not changed; every sample names every score, with None if its task has no such score.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from paceline.apps.evaluation.statistics import estimate
from paceline.apps.model_server.serving import ServedModel, endpoint_of
from paceline.errors import InvalidInput
from paceline.files.model_source import tokenizer_source
from paceline.models.evaluation_results import problem_id

Json = dict[str, Any]


@dataclass(frozen=True)
class ScoredSample:
    task: str
    index: int
    sample: int
    prompt: Any
    completion: str
    scores: Mapping[str, float]
    """Maps the name of a score to its value. The first score counts as the reward."""
    choices: Sequence[Mapping[str, Any]] = field(default_factory=tuple)
    """Log-probability of each answer and whether it is greedy, for a task that chooses among answers."""


@dataclass(frozen=True)
class HarnessRun:
    version: str
    samples: Sequence[ScoredSample]
    results: Json


MODEL, CHAT = "local-completions", "local-chat-completions"
CONCURRENT = 8
"""Largest number of requests that a harness sends at the same time."""


def lm_eval_command(url: str, model: str, tokenizer: str, folder: Path, arguments: Sequence[str]) -> list[str]:
    """Return lm-eval's arguments: the user's, and those for the endpoint. `tokenizer` is a folder: log-probabilities
    are requested by token ids. With `--model local-chat-completions` among the user's arguments, chats are sent."""
    given = list(arguments)
    kind = given[given.index("--model") + 1 :][:1] if "--model" in given else []
    if kind and kind[0] not in (MODEL, CHAT):
        raise InvalidInput(f"--model {kind[0]} after -- is not the endpoint; leave it out, or name {MODEL} or {CHAT}")
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


def read_lm_eval(folder: Path) -> HarnessRun:
    """Return the results in lm-eval's output folder. Raises InvalidInput if there are none."""
    files = sorted(folder.rglob("results_*.json"))
    if not files:
        raise InvalidInput("lm-eval has written no results; see its output for the reason")
    found = json.loads(files[-1].read_text())
    samples = [each for path in sorted(folder.rglob("samples_*.jsonl")) for each in _samples_of_lm_eval(path)]
    return HarnessRun(str(found.get("lm_eval_version", "")), samples, found["results"])


def _samples_of_lm_eval(path: Path) -> Iterator[ScoredSample]:
    """Yield the samples of a task. The file has a line for each filter of a sample; a sample's scores are merged."""
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
        requests = [
            each for _, each in sorted(first["arguments"].items(), key=lambda each: int(each[0].rpartition("_")[2]))
        ]
        choices = _choices(first["filtered_resps"])
        completion = (
            requests[max(range(len(choices)), key=lambda each: choices[each]["logprob"])]["arg_1"]
            if choices
            else str(first["filtered_resps"][0])
        )
        yield ScoredSample(task, index, 0, requests[0]["arg_0"], completion, scores, choices)


def _choices(responses: Any) -> list[dict[str, Any]]:
    """Return the log-probability of each answer and whether it is greedy; empty for a task that generates."""
    if not all(isinstance(each, list) and len(each) == 2 for each in responses):
        return []
    return [{"logprob": float(logprob), "is_greedy": str(greedy) == "True"} for logprob, greedy in responses]


SERVICE = "paceline"
"""Name of the endpoint in `openai-api/<name>/<model>`; its environment variables begin with it."""
LETTERS = {"C": 1.0, "I": 0.0, "P": 0.5, "N": 0.0}
"""Inspect's values for correct, incorrect, partial and no answer, as its own `accuracy` counts them."""


def inspect_command(url: str, model: str, tokenizer: str, folder: Path, arguments: Sequence[str]) -> list[str]:
    """Return Inspect's arguments: the user's, and those for the endpoint; `variables` has the URL."""
    own = ["--model", f"openai-api/{SERVICE}/{model}", "--log-dir", str(folder), "--log-format", "json"]
    return ["eval", *arguments, *own, "--display", "plain"]


def inspect_variables(url: str) -> dict[str, str]:
    """Return the environment variables for the endpoint. A served model accepts any key."""
    return {f"{SERVICE.upper()}_BASE_URL": url, f"{SERVICE.upper()}_API_KEY": "none"}


def read_inspect(folder: Path) -> HarnessRun:
    """Return the results in Inspect's logs. Raises InvalidInput if there is no log, or one of a failed run."""
    logs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    if not logs:
        raise InvalidInput("inspect has written no log; see its output for the reason")
    for log in logs:
        if log["status"] != "success":
            message = (log.get("error") or {}).get("message", "")
            raise InvalidInput(f"inspect's task {log['eval']['task']} ended with {log['status']}: {message}")
    samples = [sample for log in logs for sample in _samples_of_inspect(log)]
    results = {log["eval"]["task"]: log.get("results") for log in logs}
    return HarnessRun(str(logs[0]["eval"]["packages"].get("inspect_ai", "")), samples, results)


def _samples_of_inspect(log: dict[str, Any]) -> Iterator[ScoredSample]:
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
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _values(f"{scorer}/{name}", each)
    elif isinstance(value, bool | int | float):
        yield scorer, float(value)
    elif value in LETTERS:
        yield scorer, LETTERS[value]


FOLDER = Path(".venv-harnesses/bin")
"""Folder of the harnesses' programs, below the working directory; `make harnesses` installs them there."""
STDERR = 2
"""File descriptor to which all of a harness' output goes."""
END_S = 10.0
"""Longest wait in seconds for an interrupted harness to end; then it is killed."""


HARNESSES = {
    "lm-eval": ("lm_eval", lm_eval_command, read_lm_eval),
    "inspect": ("inspect", inspect_command, read_inspect),
}
"""Maps a harness to its program, its arguments for an endpoint, and the function that reads its results."""


async def run_harness(served: ServedModel, name: str, arguments: Sequence[str]) -> HarnessRun:
    """Serve a model on a free port of loopback, run the harness `name` against it, and return its results.

    The harness's output goes to stderr. Raises InvalidInput if it is not installed, fails, or leaves no results.
    """
    program, command_of, read = HARNESSES[name]
    path = program_of(program)
    policy = served.spec.policy
    tokenizer = await asyncio.to_thread(tokenizer_source, policy.tokenizer_name or policy.model_name)
    with tempfile.TemporaryDirectory(prefix="paceline-harness-") as folder:
        async with endpoint_of(served, "127.0.0.1", 0) as url:
            command = command_of(url, served.run_id, tokenizer, Path(folder), arguments)
            further = inspect_variables(url) if name == "inspect" else {}
            status = await _ended([str(path), *command], further)
        if status != 0:
            raise InvalidInput(f"{program} ended with status {status}; its output is above")
        return await asyncio.to_thread(read, Path(folder))


def program_of(name: str) -> Path:
    beside = FOLDER / name
    found = shutil.which(name) or (str(beside.absolute()) if beside.is_file() else None)
    if found is None:
        raise InvalidInput(
            f"{name} is neither on the path nor in {FOLDER}; `make harnesses` installs it, in a separate environment"
        )
    return Path(found)


async def _ended(command: Sequence[str], variables: dict[str, str]) -> int:
    """Return the exit status of a command, without a deadline: tasks set its duration."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    process = await asyncio.create_subprocess_exec(
        *command, env=environment | variables, stdin=asyncio.subprocess.DEVNULL, stdout=STDERR
    )
    try:
        return await process.wait()
    except asyncio.CancelledError:
        process.terminate()
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        raise


def result_of(
    run: HarnessRun, harness: str, arguments: Sequence[str], model: str, seed: int
) -> tuple[Json, list[Json]]:
    """Return the result and the samples. Raises InvalidInput if no sample has a score."""
    labels = list(dict.fromkeys(f"{each.task}/{name}" for each in run.samples for name in each.scores))
    if not labels:
        raise InvalidInput(
            f"{harness} has no scores of single samples, which a comparison needs; its own results are in its output"
        )
    samples = [_sample(each, labels) for each in run.samples]
    means: dict[str, dict[str, list[float]]] = {}
    for each in samples:
        values = {"reward": each["reward"], **{f"reward/{name}": v for name, v in each["rewards"].items()}}
        for name, value in values.items():
            if value is not None:
                means.setdefault(name, {}).setdefault(each["problem"], []).append(value)
    metrics = {
        name: estimate(np.array([sum(found) / len(found) for found in by_problem.values()]), seed)._asdict()
        for name, by_problem in means.items()
    }
    problems = {each["problem"] for each in samples}
    result: Json = {
        "model": model,
        "k": max(each["sample"] for each in samples) + 1,
        "seed": seed,
        "problems": len(problems),
        "failed": sum(not each.scores for each in run.samples),
        "failures": [],
        "metrics": metrics,
        "harness": {"name": harness, "version": run.version, "arguments": list(arguments), "results": run.results},
    }
    return result, samples


def _sample(scored: ScoredSample, labels: Sequence[str]) -> Json:
    own = {f"{scored.task}/{name}": value for name, value in scored.scores.items()}
    entry: Json = {
        "problem": problem_id([scored.task, scored.index, scored.prompt]),
        "task": scored.task,
        "index": scored.index,
        "sample": scored.sample,
        "prompt": scored.prompt,
        "completion": scored.completion,
        "reward": next(iter(own.values()), None),
        "rewards": {label: own.get(label) for label in labels},
    }
    return entry | ({"choices": list(scored.choices)} if scored.choices else {})
