"""Checks the newest run under a folder that was evaluated before and after: the model learnt, and the books balance.

Prints the run's folder. Exit status 1 says on stderr what is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

REWARD_BEFORE_MAX = 0.6
REWARD_AFTER_MIN = 0.9


def newest_summary(runs: Path) -> tuple[Path, dict[str, Any]]:
    """Path and content of the newest summary.json with both rewards. Exits when there is none."""
    for path in sorted(runs.rglob("summary.json"), key=lambda path: path.stat().st_mtime, reverse=True):
        summary: dict[str, Any] = json.loads(path.read_text())
        if summary.get("reward_before") is not None and summary.get("reward_after") is not None:
            return path, summary
    raise SystemExit(f"no summary.json with reward_before and reward_after under {runs}")


def faults(summary: dict[str, Any]) -> list[str]:
    """Return the faults of a summary, a sentence each."""
    tokens = [f"{name}_tokens" for name in ("generated", "trained", "dropped", "live")]
    missing = [key for key in ("steps", "samples", "seconds", *tokens) if key not in summary]
    if missing:
        return [f"it lacks {', '.join(missing)}"]
    found = []
    if summary["reward_before"] > REWARD_BEFORE_MAX:
        found.append(f"reward_before {summary['reward_before']:.3f} is above {REWARD_BEFORE_MAX}")
    if summary["reward_after"] < REWARD_AFTER_MIN:
        found.append(f"reward_after {summary['reward_after']:.3f} is below {REWARD_AFTER_MIN}")
    generated, *ended = (summary[name] for name in tokens)
    if generated != sum(ended):
        found.append(f"the books do not balance: {generated} tokens generated, {sum(ended)} accounted for")
    return found


def main() -> None:
    """Checks what is under the folder that the command line names."""
    path, summary = newest_summary(Path(sys.argv[1]))
    if found := faults(summary):
        raise SystemExit("\n".join(f"{path}: {fault}" for fault in found))
    print(
        f"{path}: reward {summary['reward_before']:.3f} → {summary['reward_after']:.3f}, {summary['steps']} steps, "
        f"{summary['samples']} samples, {summary['seconds']:.0f} s; the books balance",
        file=sys.stderr,
    )
    print(path.parent)


if __name__ == "__main__":
    main()
