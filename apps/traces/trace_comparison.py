"""`paceline traces compare CHAMPION CANDIDATE`: two models in use, by the feedback on their answers."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import click

from paceline.apps.evaluation.decision import decision_options, end


@click.command()
@click.argument("champion", metavar="CHAMPION")
@click.argument("candidate", metavar="CANDIDATE")
@decision_options
def compare(
    champion: str,
    candidate: str,
    max_drop: float,
    margin: float,
    seed: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """Compare the rewards of two models' traces: exit status 0 promote the candidate, 1 roll back, 2 hold.

    Each is a folder of `paceline serve model --traces`, or a file, glob or URL of traces with `final_reward`.
    """
    from paceline.apps.evaluation.comparison import compare as compared
    from paceline.apps.evaluation.gate import Bounds

    sides = {name: _rewards(place) for name, place in (("champion", champion), ("candidate", candidate))}
    report = compared(sides["champion"].rewards, sides["candidate"].rewards, Bounds(max_drop, margin), seed)
    for name, side in sides.items():
        report[name] |= {"source": side.source, "models": sorted(side.models), "unrated": side.unrated}
    end(report, report["decision"], _lines(report), output, as_json)


class _Side:
    """The traces of one model."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.rewards: dict[bytes, list[float]] = defaultdict(list)
        """By the digest of the prompt."""
        self.models: set[str] = set()
        self.unrated = 0
        """Traces without a reward; of a folder, requests without feedback."""


def _rewards(place: str) -> _Side:
    """Return the rewards of the traces at a place. Raises DataError, NotFound."""
    from paceline.data.rows import open_rows
    from paceline.data.traces import TraceKeys, prompt_digest, read_trace

    folder = Path(place)
    side = _Side(place)
    name = f"{place.rstrip('/')}/rated-*.jsonl" if folder.is_dir() else place
    rows = open_rows(name, "train", "TRACES", lambda row: _check(read_trace(row, TraceKeys())))
    for index in range(len(rows)):
        row = rows[index]
        trace = read_trace(row, TraceKeys())
        if trace.reward is None:
            side.unrated += 1
            continue
        side.rewards[prompt_digest(trace.prompt)].append(trace.reward)
        if row.get("model"):
            side.models.add(str(row["model"]))
    if folder.is_dir():
        requests = sum(_num_lines(path) for path in folder.glob("requests-*.jsonl"))
        side.unrated = max(0, requests - sum(map(len, side.rewards.values())))
    return side


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [report["decision"]]
    for name in ("champion", "candidate"):
        side, reward = report[name], report[name]["reward"]
        lines.append(
            f"{name}: {reward['value']:.4f} [{reward['low']:.4f}, {reward['high']:.4f}] over {side['traces']:,} rated traces of "
            f"{side['prompts']:,} prompts, {side['unrated']:,} unrated {' '.join(side['models'])}".rstrip()
        )
    found, bounds = report["difference"], report["bounds"]
    lines.append(
        f"difference {found['value']:+.4f} [{found['low']:+.4f}, {found['high']:+.4f}]; max_drop {bounds['max_drop']:g}, margin "
        f"{bounds['margin']:g}"
    )
    return lines


def _num_lines(path: Path) -> int:
    from paceline.encryption.storage_key import storage_key
    from paceline.files.line_file import LineReader

    with LineReader(path, storage_key()) as file:
        return sum(1 for _ in file.stored())


def _check(_: object) -> None:
    """Take a trace that could be read."""
