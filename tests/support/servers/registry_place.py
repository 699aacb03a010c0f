"""A ledger with a trained run, an exported model with its evaluation and verdict, and a key pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from tiny_chat import save_tiny_chat
from trained_ledger import RUN_ID, Writer

from paceline.apps.evaluation.gate import Bounds, judge
from paceline.models.evaluation_results import digest_of, folder_digest, read_result, write_result
from paceline.services.cli.main import main


class Workplace:
    """A folder with what the commands on models need."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.runs = folder / "runs"
        self.key, self.public = folder / "signing.pem", folder / "signing.pem.pub"

    def run(self, *arguments: Any) -> Result:
        """Run a command on the ledger of this folder."""
        words = [str(argument) for argument in arguments]
        return CliRunner().invoke(main, [*words, "--directory", str(self.runs)], catch_exceptions=False)

    def done(self, *arguments: Any) -> Any:
        """Run a command with --json that has to succeed, and return what it prints."""
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def evaluated(self, name: str, rewards: list[float], model: str = "model") -> Path:
        """Write the evaluation of a model on as many problems as there are rewards."""
        mean = sum(rewards) / len(rewards)
        result = {
            "name": "sums",
            "k": 1,
            "problems": len(rewards),
            "metrics": {"reward": {"value": mean, "low": mean, "high": mean}},
            "digests": {"model": folder_digest(self.folder / model)},
        }
        samples = [{"problem": f"p{i}", "reward": each, "rewards": {}} for i, each in enumerate(rewards)]
        write_result(self.folder / name, result, samples)
        return self.folder / name

    def judged(self, name: str, candidate: Path, baseline: Path) -> Path:
        """Write the verdict on a candidate."""
        verdict = judge(*read_result(candidate), *read_result(baseline), Bounds())
        file = self.folder / name
        file.write_text(json.dumps(verdict | {"digest": digest_of(verdict)}))
        return file

    def registered(self, *more: Any, name: str = "sums", model: str = "model") -> Any:
        """Register a model, and return the version."""
        return self.done("models", "register", name, self.folder / model, "--signing-key", self.key, *more)

    def passed(self, *more: Any) -> Any:
        """Register a version of the trained run that has passed its gate."""
        first = self.evaluated("first", [1.0] * 30)
        verdict = self.judged("verdict.json", first, first)
        return self.registered("--run", RUN_ID, "--evaluation", first, "--verdict", verdict, *more)


def make_place(folder: Path) -> Workplace:
    """Return a workplace with a model, a run of one trained step, and keys."""
    save_tiny_chat(folder / "model")
    writer = Writer(folder, str(folder / "model"))
    writer.train_a_step()
    writer.ledger.close()
    place = Workplace(folder)
    made = CliRunner().invoke(main, ["models", "key", str(place.key)], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    return place
