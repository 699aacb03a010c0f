"""A run on hosts that share nothing but a network, through the loss of a learner's node: `make campaign NAME=hosts`.

    python tests/hosts/hosts_campaign.py [--steps 40] [--keep FOLDER]

A coordinator, two rollout workers, a reward worker and a learner of two nodes each run on a host of their own with an empty
disk, beside an S3 server and a client. Each is started by the documented command. The client submits examples/arithmetic with
a reward file and data that only its disk has. In the middle a learner's node loses its power, and a new host takes its place;
the reward file is changed and then removed at the submitter. The ledger is verified, and the run replayed, by a new
coordinator's host. The last line is the verdict; exit status 0 only if nothing was lost or trained twice and the replay is
identical.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from deployment import BUCKET, DEADLINE_S, MINE, Deployment, Submitter
from isolated_host import ROOT, Switch
from judged_campaign import keep_option, run_and_judge


class Campaign:
    """The client's side of the run, and the verdict."""

    def __init__(self, deployment: Deployment, steps: int):
        self._deployment, self._steps = deployment, steps
        self._submitter = Submitter(deployment.client, deployment.access)
        self._run_id = ""

    def prepare(self) -> None:
        """Put the example on the client's disk, and its model into the store."""
        self._submitter.prepare()

    def submit(self) -> None:
        """Submit stage 2 with the model from the store."""
        self._run_id = self._submitter.submit(
            "grpo.yaml",
            f"policy.model_name={BUCKET}/model",
            f"grpo.max_num_steps={self._steps}",
            f"checkpointing.save_period={max(2, self._steps // 5)}",
            "grpo.num_prompts_per_step=16",
            "grpo.max_val_samples=32",
        )

    def lose_a_node(self) -> None:
        """Change the submitter's reward file, lose a node in the middle, and remove the file."""
        self._submitter.reach_step(self._run_id, self._steps // 3)
        self._submitter.host.write(
            f"{MINE}/reward.py", "def correct(completions, **columns):\n    return [0.0] * len(completions)\n"
        )
        self._deployment.replace_node()
        self._submitter.reach_step(self._run_id, self._steps // 2)
        self._submitter.host.run("rm", "-r", MINE)

    def wait(self) -> None:
        """Wait until the run has ended, in whatever way."""
        self._submitter.wait(self._run_id)

    def judge(self) -> dict[str, Any]:
        """Return the verdict of `tests/chaos/verdict.py` on the ledger, after another coordinator has had it. The replay runs on
        the coordinator's host, from its disk and the store."""
        host = self._deployment.coordinator
        host.stop()
        self._deployment.start_coordinator(host)
        self._submitter.until_answered()
        host.stop()
        done = host.run("python", "-c", JUDGE, self._run_id, timeout_s=DEADLINE_S)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


JUDGE = f"""
import dataclasses, json, pathlib, sys
sys.path += ["{ROOT}/tests/chaos"]
from verdict import judge
print(json.dumps(dataclasses.asdict(judge(pathlib.Path("/tmp/ledger"), sys.argv[1]))))
"""


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and what its judge found."""

    lost: int
    twice: int
    identical: bool
    problems: list[str]
    sessions: int

    @property
    def line(self) -> str:
        """Return the verdict."""
        return f"lost {self.lost}, twice {self.twice}, {'identical' if self.identical else 'another'} replay"

    @property
    def is_good(self) -> bool:
        """Return whether the promise was kept: there was a loss to survive, and nothing else is wrong."""
        return not (self.lost or self.twice or self.problems) and self.identical and self.sessions > 1


def run_campaign(steps: int, logs: Path) -> Outcome:
    """Run all of it."""
    with Switch() as switch:
        deployment = Deployment(switch, logs)
        campaign = Campaign(deployment, steps)
        deployment.start()
        campaign.prepare()
        campaign.submit()
        campaign.lose_a_node()
        campaign.wait()
        verdict = campaign.judge()
        sessions = sum("continues from step" in line for line in (logs / "learner-0.log").read_text().splitlines())
        identical = not verdict["wrong_weights"] and not verdict["stalled"]
        return Outcome(verdict["lost"], verdict["trained_twice"], identical, verdict["problems"], 1 + sessions)


@click.command()
@click.option("--steps", default=40, show_default=True)
@keep_option
def main(steps: int, keep: Path | None) -> None:
    """Run the campaign and print the verdict."""
    run_and_judge("hosts", lambda logs: run_campaign(steps, logs), keep)


if __name__ == "__main__":
    main()
