"""`paceline.train`: services on this host, one run to its end, and its results. For scripts and notebooks.

    result = paceline.train(
        policy={"model_name": "./model"}, data="prompts.jsonl", rewards=[my_reward], grpo={"max_num_steps": 20}
    )
    pandas.DataFrame(result.metrics).plot("step", "reward")

Promise: the services end with the call, however it ends. An interrupted run is cancelled, so the next call does not
continue it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.calls.token import VARIABLE
from paceline.client import ENDED_STATES, Client, Event, RunState
from paceline.encryption.encrypted_file import encrypt
from paceline.encryption.storage_key import storage_key
from paceline.errors import InvalidInput, NotFound, PacelineError, counted
from paceline.files.names import LEDGER_NAME
from paceline.files.whole_file import write_whole
from paceline.host.process import require_linux
from paceline.services.common.gpus import divide, visible_gpus
from paceline.services.local.cluster import LocalCluster
from paceline.services.local.function_source import named_function
from paceline.services.local.room import check_paths_are_here, sizes_for
from paceline.spec import RewardFunctionSection, RunSpec
from paceline.spec.reading import load_spec, parse_spec

MAX_DEATHS = 5
"""Deaths in a row after which a service is given up, because a caller prefers an error to waiting."""
RETRIED = "It is retried automatically"
"""Last words of the message about a pause that the coordinator ends by itself."""

Reward = Callable[..., Any] | str | RewardFunctionSection | Mapping[str, Any]
Data = str | Path | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class TrainedRun:
    """A run that has succeeded."""

    run_id: str
    directory: Path
    """Folder of the run, with metrics.jsonl, tensorboard/, checkpoints/ and summary.json."""
    export_path: Path | None
    """Model folder for `from_pretrained`; None if the run has exported none."""
    metrics: list[dict[str, float]]
    """Metrics of each step, with the step's number as `step`: rows for a DataFrame."""
    evaluations: list[dict[str, float]]
    """Results of each evaluation, with the version as `step`."""
    summary: dict[str, Any] = field(repr=False)
    """Content of the run's summary.json."""

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Return the groups that a step trained on: prompt, columns, and for each completion its text, tokens, versions
        and rewards. Raises NotFound if there is no such step, if samples were not kept, or if the ledger is on
        another machine."""
        from paceline.services.coordinator.ledger.ledger import Ledger
        from paceline.services.coordinator.records.reader import records_in

        path = self.directory.parent / LEDGER_NAME
        if not path.is_file():
            raise NotFound(
                f"the ledger {path} is not on this machine; read the samples on the coordinator's host with "
                f"`paceline samples {self.run_id} --step {step}`"
            )
        with contextlib.closing(Ledger(path, read_only=True)) as ledger:
            return list(records_in(ledger).groups(self.run_id, step))


def train(
    spec: RunSpec | Mapping[str, Any] | str | Path | None = None,
    overrides: Sequence[str] = (),
    *,
    rewards: Sequence[Reward] | None = None,
    data: Data | None = None,
    validation: Data | None = None,
    directory: str | Path = "runs",
    show: Callable[[str], None] | None = print,
    start_cluster: Callable[..., contextlib.AbstractContextManager[LocalCluster]] = LocalCluster,
    connect: Callable[..., Client] = Client,
    **sections: Any,
) -> TrainedRun:
    """Train one run on this host, and return its results after it has succeeded.

    `spec` is a `RunSpec`, a mapping of sections, or a YAML file with `overrides` ("section.key=value"); `sections`
    (`policy={...}`, `algorithm="sft"`) override its keys, or are the whole spec. `rewards` are function objects, names
    (`math_accuracy`, `file.py:function`) or sections with weights. `data` and `validation` are paths, or rows that are
    written to a file. `directory` holds the ledger and the runs; `show` gets a line for each step and warning, None
    shows nothing. `start_cluster` and `connect` are for tests.

    Raises InvalidInput (SpecError, DataError) for a spec or data that cannot be trained, and on other platforms than
    Linux; PacelineError, with the run's message, if the run does not succeed.
    """
    require_linux("paceline.train")
    directory = Path(directory).resolve()
    spec = assembled(spec, overrides, sections, rewards, data, validation, directory)
    check_paths_are_here(spec)
    gpus = visible_gpus()
    sizes, division = divide(sizes_for([spec]), len(gpus), rollout=spec.samples)
    say = show or (lambda line: None)
    if division:
        say(division)
    with (
        _own_token(),
        start_cluster(directory, sizes, say=say, max_deaths=MAX_DEATHS, gpus=gpus) as cluster,
        connect(cluster.address) as client,
    ):
        cluster.on_failure = client.close
        for earlier in client.runs():
            if RunState.of(earlier) not in ENDED_STATES:
                say(f"run {earlier.run_id} is still open and goes first; `paceline cancel {earlier.run_id}` ends it")
        run_id = client.submit(spec).run_id
        say(f"run {run_id}, {counted(client.get(run_id).max_num_steps, 'step')}; logs in {directory}/logs")
        try:
            return _followed(client, run_id, say)
        except BaseException:
            with contextlib.suppress(PacelineError):
                client.cancel(run_id)
            cluster.check()  # a service that was given up is the cause of any error here
            raise


def assembled(
    spec: RunSpec | Mapping[str, Any] | str | Path | None,
    overrides: Sequence[str],
    sections: Mapping[str, Any],
    rewards: Sequence[Reward] | None,
    data: Data | None,
    validation: Data | None,
    directory: Path,
) -> RunSpec:
    """Return the spec of a call of `train`; files that it needs are written below `directory`. Raises InvalidInput."""
    if overrides and not isinstance(spec, str | Path):
        raise InvalidInput("overrides need a spec's file; give sections as keyword arguments instead")
    if isinstance(spec, str | Path):
        spec = load_spec(spec, tuple(overrides))
    tree = spec.model_dump(mode="json") if isinstance(spec, RunSpec) else _copied(spec or {})
    for name, section in sections.items():
        before = tree.get(name)
        laid_over = isinstance(before, dict) and isinstance(section, Mapping)
        tree[name] = {**before, **section} if laid_over and isinstance(before, dict) else _copied(section)
    if rewards is not None:
        tree["rewards"] = [_reward(reward, directory / "functions") for reward in rewards]
        tree["folder"] = ""  # they may lie outside the folder of the spec's file
    for key, source in (("train", data), ("validation", validation)):
        if source is not None:
            section = tree.setdefault("data", {})
            if not isinstance(section, dict):
                raise InvalidInput(f"data is {type(section).__name__}, but must be a mapping")
            section[key] = _data_file(source, directory / "data")
    folder = tree.pop("folder", "")
    return parse_spec(tree, base=Path.cwd()).model_copy(update={"folder": folder})


def _copied(section: Any) -> Any:
    if isinstance(section, Mapping):
        return {name: _copied(value) for name, value in section.items()}
    return section.model_dump(mode="json") if hasattr(section, "model_dump") else section


def _reward(reward: Reward, folder: Path) -> Any:
    if isinstance(reward, str):
        return {"function": reward}
    if isinstance(reward, RewardFunctionSection):
        return reward.model_dump(mode="json")
    if isinstance(reward, Mapping):
        function = reward.get("function")
        return {**reward, "function": function if isinstance(function, str) else _named(function, folder)}
    return {"function": _named(reward, folder), "name": getattr(reward, "__name__", None)}


def _named(function: Any, folder: Path) -> str:
    if not callable(function):
        raise InvalidInput(f"a reward is a function or its name, not {function!r:.60}")
    return named_function(function, folder)


def _data_file(source: Data, folder: Path) -> str:
    """Return the path of a data set; rows go to a file named after their content, encrypted with a storage key."""
    if isinstance(source, str | Path):
        return str(source)
    lines = []
    for number, row in enumerate(source):
        try:
            lines.append(json.dumps(dict(row)))
        except (TypeError, ValueError) as error:
            raise InvalidInput(f"row {number} of the data cannot be written as JSON: {error}") from None
    text = "".join(f"{line}\n" for line in lines).encode()
    path = folder / f"{hashlib.sha256(text).hexdigest()[:12]}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    key = storage_key()
    write_whole(path, text if key is None else encrypt(text, key))
    return str(path)


@contextlib.contextmanager
def _own_token() -> Iterator[None]:
    """Restore the environment's token file after the block, because the next call may have another directory."""
    before = os.environ.get(VARIABLE)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(VARIABLE, None)


def _followed(client: Client, run_id: str, say: Callable[[str], None]) -> TrainedRun:
    metrics: list[dict[str, float]] = []
    evaluations: list[dict[str, float]] = []
    for event in client.watch(run_id):
        if event.kind == "step":
            metrics.append(event.content)
        elif event.kind == "evaluation":
            evaluations.append(event.content)
        if line := _line(event):
            say(line)
        if _needs_a_person(event):
            raise PacelineError(f"run {run_id} was paused, so it was cancelled: {event.content.get('message', '')}")
    run = client.get(run_id)
    state, folder = RunState.of(run), Path(run.directory)
    if state is not RunState.SUCCEEDED:
        raise PacelineError(f"run {run_id} {state}: {run.message or 'see its events'}; its folder is {folder}")
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    export = summary.get("export_path")
    return TrainedRun(run_id, folder, Path(export) if export else None, metrics, evaluations, summary)


def _needs_a_person(event: Event) -> bool:
    paused = event.kind == "state" and event.content.get("state") == RunState.PAUSED
    return paused and RETRIED not in str(event.content.get("message", ""))


def _line(event: Event) -> str:
    content = event.content
    match event.kind:
        case "step":
            values = [
                f"{name} {content[name]:.4g}"
                for name in ("reward", "loss", "grad_norm")
                if isinstance(content.get(name), int | float)
            ]
            return f"step {int(content['step']) + 1}: {', '.join(values)}"
        case "evaluation":
            value = content.get("reward", content.get("loss"))
            return f"evaluation of version {content.get('step')}: {value}"
        case "warning":
            return f"warning: {content.get('message', '')}"
        case "state" if content.get("message"):
            return f"{content['state']}: {content['message']}"
    return ""
