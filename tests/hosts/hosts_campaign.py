"""A run on hosts that share nothing but a network, through the loss of a learner's node: `make hosts`.

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
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from isolated_host import ROOT, Host, Switch, missing

TOKEN = "a-token-that-an-operator-copies"
MINE = "/tmp/mine"
"""The submitter's folder, on its own disk."""
BUCKET = "s3://bucket"
DEADLINE_S = 420.0


@dataclass
class Deployment:
    """The hosts by what runs on them."""

    switch: Switch
    logs: Path

    def __post_init__(self) -> None:
        self.store = self._new("store")
        self.coordinator = self._new("coordinator")
        self.client = self._new("client")
        self.address = f"{self.coordinator.address}:7070"

    def start(self) -> None:
        """Start every service as the documents say."""
        self.store.start("python", "-m", "moto.server", "-H", self.store.address, "-p", "5000")
        self.start_coordinator(self.coordinator)
        for number in range(2):
            self.serve(self._new(f"rollout-{number}"), "rollout")
        self.serve(self._new("reward"), "reward")
        self.learner = self._new("learner-0")
        for node_rank, host in enumerate((self.learner, self._new("learner-1"))):
            self.start_node(host, node_rank)

    def start_coordinator(self, host: Host) -> None:
        """Start the coordinator on its host."""
        listen = ("--insecure", "--host", host.address, "--exchange-port", "7071")
        directories = ("--directory", "/tmp/ledger", "--store", f"{BUCKET}/runs")
        host.start("paceline", "serve", "coordinator", *listen, *directories)

    def start_node(self, host: Host, node_rank: int) -> None:
        """Start a node of the learner; the last one started is `self.node`."""
        rendezvous = f"{self.learner.address}:29400"
        self.serve(host, "learner", "--nodes", "2", "--node-rank", str(node_rank), "--rendezvous", rendezvous)
        self.node = host

    def replace_node(self) -> None:
        """End node 1 as a loss of power does, and start it on a new host."""
        self.node.end()
        self.start_node(self._new("learner-1-again"), 1)

    def serve(self, host: Host, role: str, *options: str) -> None:
        """Start a worker's service on a host."""
        host.start(
            "paceline",
            "serve",
            role,
            "--coordinator",
            self.address,
            "--insecure",
            "--host",
            host.address,
            *options,
        )

    def _new(self, name: str) -> Host:
        host = self.switch.host(name, self.logs)
        host.write("/tmp/token", TOKEN)
        store = host if name == "store" else self.store
        host.variables |= {
            "PACELINE_TOKEN_FILE": "/tmp/token",
            "AWS_ENDPOINT_URL": f"http://{store.address}:5000",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "*",
        }
        return host


class Campaign:
    """The client's side of the run, and the verdict."""

    def __init__(self, deployment: Deployment, steps: int):
        self._deployment, self._steps = deployment, steps
        self._client = deployment.client
        self._run_id = ""

    def prepare(self) -> None:
        """Put the example on the client's disk, and its model into the store."""
        for name in ("prepare.py", "reward.py", "sft.yaml", "grpo.yaml"):
            self._client.write(f"{MINE}/{name}", (ROOT / "examples" / "arithmetic" / name).read_text())
        self._client.run("sh", "-c", f"cd {MINE} && python prepare.py", timeout_s=DEADLINE_S)
        until(
            lambda: self._client.run("python", "-c", MAKE_BUCKET, check=False).returncode == 0,
            "the store answers",
        )
        self._client.run("python", "-c", UPLOAD, f"{MINE}/model", f"{BUCKET}/model", timeout_s=DEADLINE_S)
        self._client.run("rm", "-r", f"{MINE}/model")

    def submit(self) -> None:
        """Submit stage 2 with the model from the store; the submitter's other files travel with it."""
        overrides = [
            f"policy.model_name={BUCKET}/model",
            f"grpo.max_num_steps={self._steps}",
            f"checkpointing.save_period={max(2, self._steps // 5)}",
            "grpo.num_prompts_per_step=16",
            "grpo.max_val_samples=32",
        ]
        until(lambda: self._paceline("members", check=False)[0] == 0, "the coordinator answers")
        status, said = self._paceline("submit", f"{MINE}/grpo.yaml", *overrides, "--json")
        if status:
            raise RuntimeError(said)
        self._run_id = str(json.loads(said.splitlines()[-1])["run_id"])

    def lose_a_node(self) -> None:
        """Change the submitter's reward file, lose a node in the middle, and remove the file."""
        until(lambda: self._run()["step"] >= self._steps // 3, f"step {self._steps // 3}")
        self._client.write(
            f"{MINE}/reward.py", "def correct(completions, **columns):\n    return [0.0] * len(completions)\n"
        )
        self._deployment.replace_node()
        until(lambda: self._run()["step"] >= self._steps // 2, f"step {self._steps // 2}")
        self._client.run("rm", "-r", MINE)

    def wait(self) -> None:
        """Wait until the run has ended, in whatever way."""
        until(lambda: self._run()["state"] not in ("running", "queued"), "the run ends")

    def judge(self) -> dict[str, Any]:
        """Return the verdict of `tests/chaos/verdict.py` on the ledger, after another coordinator has had it. The replay runs on
        the coordinator's host, from its disk and the store."""
        host = self._deployment.coordinator
        host.stop()
        self._deployment.start_coordinator(host)
        until(lambda: self._paceline("members", check=False)[0] == 0, "the new coordinator answers")
        host.stop()
        done = host.run("python", "-c", JUDGE, self._run_id, timeout_s=DEADLINE_S)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def _run(self) -> dict[str, Any]:
        status, said = self._paceline("runs", "--json", check=False)
        lines = [json.loads(line) for line in said.splitlines()] if status == 0 else []
        found = [line for line in lines if line["run_id"] == self._run_id]
        return found[0] if found else {"step": -1, "state": "queued"}

    def _paceline(self, *arguments: str, check: bool = True) -> tuple[int, str]:
        command = ("paceline", *arguments, "--coordinator", self._deployment.address, "--insecure")
        done = self._client.run(*command, timeout_s=DEADLINE_S, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.returncode, done.stdout


JUDGE = f"""
import dataclasses, json, pathlib, sys
sys.path += ["{ROOT}/tests/chaos", "{ROOT}/tests/support"]
from verdict import judge
print(json.dumps(dataclasses.asdict(judge(pathlib.Path("/tmp/ledger"), sys.argv[1]))))
"""
MAKE_BUCKET = "import s3fs; s3fs.S3FileSystem().makedirs('bucket', exist_ok=True)"
UPLOAD = "import sys, fsspec.generic, s3fs; s3fs.S3FileSystem().put(sys.argv[1] + '/', sys.argv[2] + '/', recursive=True)"


def until(condition: Any, what: str, timeout_s: float = DEADLINE_S) -> None:
    """Wait until something holds. Raises TimeoutError."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what}: not after {timeout_s:g} s")
        time.sleep(1.0)


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
        sessions = sum(
            "goes on from step" in line for line in (logs / "learner-0.log").read_text().splitlines()
        )
        identical = not verdict["wrong_weights"] and not verdict["stalled"]
        return Outcome(
            verdict["lost"], verdict["trained_twice"], identical, verdict["problems"], 1 + sessions
        )


@click.command()
@click.option("--steps", default=40, show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="Folder for the services' logs.")
def main(steps: int, keep: Path | None) -> None:
    """Run the campaign and print the verdict."""
    if why := missing():
        raise click.ClickException(f"this machine cannot make hosts: {why}")
    began_s, logs = time.monotonic(), keep or Path(tempfile.mkdtemp(prefix="paceline-hosts-"))
    logs.mkdir(parents=True, exist_ok=True)
    try:
        outcome = run_campaign(steps, logs)
    except BaseException:
        click.echo(f"the services' logs are in {logs}", err=True)
        raise
    for problem in outcome.problems:
        click.echo(problem, err=True)
    if keep is None and outcome.is_good:
        shutil.rmtree(logs)
    click.echo(f"hosts: {outcome.line}, {time.monotonic() - began_s:.0f} s")
    raise SystemExit(0 if outcome.is_good else 1)


if __name__ == "__main__":
    main()
