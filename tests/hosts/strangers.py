"""Strangers against a deployment with certificates, while it trains: `make campaign NAME=strangers`.

    python tests/hosts/strangers.py [--minutes 2.5] [--keep FOLDER]

A coordinator, a learner of two ranks, two rollout workers and a reward worker each run on a host of their own, started by the commands
of docs/operate/security_setup.md, beside an S3 server and a client, who submits examples/arithmetic. While the run trains, a host without rights
tries what `probes.py` lists. Every attempt has to be refused and to leave a line in a log; calls to the coordinator have to be in the
audit log too; those with every right have to be let in.
Somebody with fewer rights tries five ways to become operator: a worker gives a false address, another user takes the port of a coordinator that
was killed, servers with other certificates pose as the coordinator, links lead to its secrets, and another user of a worker's host makes a
cache. No token reaches them, what reaches them opens nothing, and none of it is used. At the end no log and no file of the coordinator has
a secret but those that may.
The token of a worker that has joined is revoked too, and it has to be out within five seconds. The last line is the verdict; exit
status 0 only if all were refused, the run ended well with balanced books in one session, and no group was given out twice.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from deployment import BUCKET, DEADLINE_S, Submitter, until
from isolated_host import ROOT, Host, Switch, wait_for
from judged_campaign import keep_option, run_and_judge
from secure_deployment import SecureDeployment, write_folder

DIRECTORY = "runs"
"""Directory of the coordinator, below its working directory."""
PROBES = ("python", f"{ROOT}/tests/hosts/probes.py", "/tmp/plan.json")
IMPOSTOR = ("python", f"{ROOT}/tests/hosts/impostors.py")
OUT_WITHIN_S = 5.0
LURE_PORT = 7077
POSE_PORTS = {"eve": 7078, "insider": 7079}
"""Certificates with which the strangers pose as the coordinator, and their ports."""
LINKS = {
    "token.jsonl": "runs/token",
    "tokens.csv": "runs/tokens.json",
    "key.jsonl": "/tmp/tls/tls.key",
    "ledger.parquet": "runs/ledger.sqlite",
}
"""Files named like data, on the coordinator's host, and the secrets to which they lead."""
OPEN_CACHE = """
from paceline.bundle.cache import KIND
KIND.of_user("bundles").open("x", 1, lambda _: False, lambda _: None)
"""
MAKE_CACHE = "setpriv --reuid 65534 --regid 65534 --clear-groups sh -c 'umask 0; mkdir /tmp/theirs'"
ASK_AT = """
import sys
from pathlib import Path
from paceline.client import Client
address, at, *files = sys.argv[1:]
tls_dir, token_file = map(Path, files)
with Client(address, tls_dir=tls_dir, token_file=token_file) as client:
    client.generate("1+1=", worker=at)
"""
"""Asks the worker at an address for completions, as `paceline generate` does."""
PROVE = "/paceline.v1.AccessService/Prove"
GRPC, AGENT, HTTP = "coordinator", "rollout-0", "refused an HTTP request"
LOGGED = (
    ("no TLS, port", GRPC, "WRONG_VERSION_NUMBER"),
    ("no certificate", GRPC, "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
    ("certificate: other-authority", GRPC, "unable to get local issuer certificate"),
    ("certificate: expired", GRPC, "certificate has expired"),
    ("a coordinator's certificate joins", GRPC, "refused a worker at"),
    ("a worker without certificate at", GRPC, "refused a worker at"),
    ("a member speaks for another", GRPC, "refused a request"),
    ("a foreign peer without CURVE", GRPC, "its handshake failed"),
    ("a replayed connection", GRPC, "its handshake failed"),
    ("a foreign peer with a key", GRPC, "its key is no member's"),
    ("a peer that has left", GRPC, "its key is no member's"),
    ("reads weights: insider", AGENT, "refused a reader at"),
    ("reads weights:", AGENT, "a reader on another host has ended"),
    ("metrics with", GRPC, HTTP),
    ("completions with", "rollout-", HTTP),
)
"""What a service's log says of a refused probe: the beginnings of the probe's name and of the log's, and the text."""

AUDITED = ("UNAUTHENTICATED", "PERMISSION_DENIED", "FAILED_PRECONDITION")
"""Statuses of calls that were refused, and not by TLS."""
CALLS = {f"paceline.v1.{call}" for call in ("WorkerService/Connect", "RunService/Submit", "RunService/Cancel")} | {
    "exchange/task"
}
"""What the audit log has refusals of."""


@dataclass
class Outcome:
    """How the strangers and the run fared."""

    refused: int = 0
    tried: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Return whether all were refused and the run was not disturbed."""
        return self.tried > 0 and self.refused == self.tried and not self.problems

    @property
    def line(self) -> str:
        """Return the verdict."""
        run = "run undisturbed" if not self.problems else f"{len(self.problems)} problems"
        return f"refused {self.refused} of {self.tried}, {run}"


class Strangers:
    """A host with certificates and tokens that give no right, and one insider's."""

    def __init__(self, deployment: SecureDeployment) -> None:
        self._deployment = deployment
        self._host = deployment.host("stranger")

    def prepare(self) -> None:
        """Make what they have."""
        deployment, coordinator = self._deployment, self._deployment.coordinator
        deployment.operator.run("paceline", "certs", "init", "other")
        trusted = deployment.files("person")
        here = f"--host {self._host.address}"
        certificates = {
            "insider": deployment.issue("insider", f"--role worker {here}"),
            "eve": deployment.issue("eve", f"--role viewer {here}"),
            "wrong-role": deployment.issue("elsewhere", f"--role coordinator {here}"),
            "expired": deployment.issue("late", f"--role worker --days 0.00001 {here}"),
            # It knows the authority, which is no secret, and has its certificate from another.
            "other-authority": deployment.issue("insider", f"--role worker {here}", "other") | trusted,
            "person": trusted,
        }
        self._folders = {name: f"/tmp/{name}" for name in certificates}
        for name, files in certificates.items():
            write_folder(self._host, self._folders[name], files)
        tokens = self._tokens = {"none": "", "wrong": "w" * 43, "worker": deployment.token("workers").strip()}
        for name in ("viewer", "scraper", "submitter"):
            tokens[name] = self._token(name, name)
        tokens["revoked"] = self._token("revoked", "worker")
        tokens["short-lived"] = self._token("short-lived", "worker")
        tokens["expired"] = self._token("expired", "worker", "--days", "0.00001")
        coordinator.run("paceline", "token", "revoke", "stranger-revoked")

    def plan(self, run_id: str) -> None:
        """Write the plan for `probes.py`, once a run trains."""
        deployment, coordinator = self._deployment, self._deployment.coordinator
        members = [json.loads(line) for line in deployment.members().splitlines()]
        (first, *_) = [member for member in members if member["role"] == "rollout"]
        plan = {
            "coordinator": deployment.address,
            "people": deployment.people_address,
            "metrics": f"https://{coordinator.address}:9464/metrics",
            "http": f"https://{first['http_address']}/v1/models",
            "agents": self._agents(),
            "victim": first["member_id"],
            "folders": self._folders,
            "tokens": self._tokens,
            "links": self._links(),
            "run_id": run_id,
        }
        self._host.write("/tmp/plan.json", json.dumps(plan))

    def _links(self) -> list[str]:
        host = self._deployment.coordinator
        for name, target in LINKS.items():
            host.run("sh", "-c", f"ln -sf $(realpath {target}) /tmp/{name}")
        return [f"/tmp/{name}" for name in LINKS]

    def pose(self, name: str) -> tuple[str, list[dict[str, str]]]:
        """Pose as the coordinator with a certificate; return what a person's command says, and the calls that came."""
        port = POSE_PORTS[name]
        access = ["--coordinator", f"{self._host.address}:{port}", "--tls-dir", "person", "--token-file", "token"]
        return self._serve(port, self._folders[name], ("paceline", "runs", *access))

    def lure(self) -> tuple[str, list[dict[str, str]]]:
        """Join as a rollout worker that gives an address of this host; return what a submitter's request for
        completions says, and the calls that came."""
        at = f"{self._host.address}:{LURE_PORT}"
        ask = ("python", "-c", ASK_AT, self._deployment.people_address, at, "person", "token")
        return self._serve(LURE_PORT, self._folders["insider"], ask, "/tmp/plan.json")

    def _serve(self, port: int, folder: str, command: Sequence[str], *plan: str) -> tuple[str, list[dict[str, str]]]:
        log = self._deployment.logs / "stranger.log"
        before = heard(log)
        impostor = start_killable(self._host, *IMPOSTOR, self._host.address, str(port), folder, *plan)
        for _line in wait_for(log, f'"posing": "{port}"', DEADLINE_S):
            pass
        done = self._deployment.client.run(*command, check=False, timeout_s=DEADLINE_S)
        kill(self._host, impostor)
        return done.stdout + done.stderr, heard(log)[len(before) :]

    def try_all(self) -> list[dict[str, Any]]:
        """Run the probes and return what came of each."""
        done = self._host.run(*PROBES, timeout_s=DEADLINE_S)
        return [json.loads(line) for line in done.stdout.splitlines()]

    def secrets(self) -> list[str]:
        """Return the tokens that the strangers have."""
        return [token for name, token in self._tokens.items() if name not in ("none", "wrong")]

    def revoke_one(self) -> float:
        """Revoke the token of a worker that has joined; return the seconds until its stream has ended."""
        log = self._deployment.logs / "stranger.log"
        self._host.start(*PROBES, "--stay")
        for _line in wait_for(log, '"joined"', DEADLINE_S):
            pass
        self._deployment.coordinator.run("paceline", "token", "revoke", "stranger-short-lived")
        revoked_s = time.time()
        (line,) = [line for line in wait_for(log, '"ended"', DEADLINE_S) if '"ended"' in line]
        return float(json.loads(line)["ended"]) - revoked_s

    def _token(self, name: str, role: str, *options: str) -> str:
        done = self._deployment.coordinator.run(
            "paceline", "token", "create", f"stranger-{name}", "--role", role, *options
        )
        return done.stdout.strip()

    def _agents(self) -> list[str]:
        """Return where the hosts' agents listen: the ports of the learner's and the rollout hosts."""
        found = []
        for name in ("learner", "rollout-0", "rollout-1"):
            address = self._deployment.hosts[name].address
            log = (self._deployment.logs / f"{name}.log").read_text()
            newest = log.rpartition(f" and on {address}:")[2]  # a busy host may have replaced its agent
            port = newest.split()[0]
            found.append(f"{address}:{port}")
        return found


def heard(log: Path) -> list[dict[str, str]]:
    """Return the calls that reached impostors, from their log."""
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith('{"heard"')]


def helps(calls: Sequence[dict[str, str]], tokens: Sequence[str]) -> list[str]:
    """Return the calls with which something helpful came: more than a request for a proof, a token, or its SHA-256."""
    hashes = [hashlib.sha256(token.encode()) for token in tokens]
    useful = [t.encode() for t in tokens] + [h.digest() for h in hashes] + [h.hexdigest().encode() for h in hashes]
    return [
        call["heard"]
        for call in calls
        if call["heard"] != PROVE or call["replayed"] == "OK" or any(u in bytes.fromhex(call["got"]) for u in useful)
    ]


def start_killable(host: Host, *command: str) -> subprocess.Popen[bytes]:
    """Start a service of a host, which `kill` ends."""
    return host.start("sh", "-c", f"echo $$ > newest.pid; exec {shlex.join(command)}")


def kill(host: Host, newest: subprocess.Popen[bytes]) -> None:
    """Kill the newest service that was started killable."""
    host.run("sh", "-c", "kill -KILL $(cat newest.pid)")
    newest.wait(DEADLINE_S)


class Loopback:
    """A host without certificates, whose other user takes the coordinator's port."""

    def __init__(self, deployment: SecureDeployment) -> None:
        self._host = deployment.host("loopback")
        self._log = deployment.logs / "loopback.log"

    def squat(self) -> str:
        """Kill the coordinator, take its port while a worker and a person come back, and start it again; return what
        was gained or lost, empty if nothing was."""
        host = self._host
        coordinator = self._serve_coordinator()
        host.start("paceline", "serve", "reward", "--coordinator", "127.0.0.1:7070", "--token-file", "runs/token")
        until(self._has_worker, "the worker is a member")
        token = host.run("cat", "runs/token").stdout.strip()
        kill(host, coordinator)
        squatter = start_killable(host, *IMPOSTOR, "127.0.0.1", "7070")
        for _line in wait_for(self._log, '"posing": "7070"', DEADLINE_S):
            pass
        until(lambda: heard(self._log), "the worker comes back to the port")
        said = self._paceline("runs").stderr
        before = len(heard(self._log))
        until(lambda: len(heard(self._log)) > before, "the worker comes again")
        kill(host, squatter)
        gained = helps(heard(self._log), [token])
        self._serve_coordinator()
        until(self._has_worker, "the worker is a member again")
        host.stop()
        return " ".join(gained) + ("" if "has not proven" in said else said)

    def token(self) -> str:
        """Return the coordinator's token."""
        return self._host.run("cat", "runs/token").stdout.strip()

    def _serve_coordinator(self) -> subprocess.Popen[bytes]:
        command = ("paceline", "serve", "coordinator", "--directory", "runs", "--port", "7070")
        service = start_killable(self._host, *command)
        until(lambda: self._paceline("members").returncode == 0, "the coordinator answers")
        return service

    def _has_worker(self) -> bool:
        return "reward" in self._paceline("members", "--json").stdout

    def _paceline(self, *arguments: str) -> Any:
        access = ("--coordinator", "127.0.0.1:7070", "--token-file", "runs/token")
        return self._host.run("paceline", *arguments, *access, check=False, timeout_s=DEADLINE_S)


class Campaign:
    """The run, and the verdict."""

    def __init__(self, deployment: SecureDeployment, minutes: float) -> None:
        self._deployment, self._minutes = deployment, minutes
        self._submitter = Submitter(deployment.client, deployment.access)
        self._secrets: list[str] = []
        self.outcome = Outcome()

    def run(self) -> None:
        """Train, and let the strangers try meanwhile."""
        strangers = Strangers(self._deployment)
        strangers.prepare()
        self._submitter.prepare()
        until(lambda: self._deployment.members().count("member_id") >= 5, "five workers are members")
        run_id = self._submitter.submit(
            "grpo.yaml",
            f"policy.model_name={BUCKET}/model",
            f"max_hours={self._minutes / 60}",
            "grpo.max_num_steps=1000000",
            "checkpointing.save_period=50",
            "grpo.num_prompts_per_step=16",
            "grpo.max_val_samples=32",
        )
        self._submitter.reach_step(run_id, 2)
        strangers.plan(run_id)
        probes = strangers.try_all()
        self._try_posing(strangers)
        self._try_lure(strangers)
        self._try_cache()
        out_s = strangers.revoke_one()
        click.echo(f"a worker whose token was revoked was out after {out_s:.1f} s")
        if out_s > OUT_WITHIN_S:
            self._problem(f"a revoked worker was out after {out_s:.1f} s, later than {OUT_WITHIN_S:g} s")
        if self._submitter.run(run_id)["state"] != "running":
            self._problem("the run ended before the strangers had tried everything; give more --minutes")
        self._judge_probes(probes)
        self._judge_run(run_id, self._submitter.wait(run_id))
        self._judge_audit(probes)
        self._try_squatting()
        self._judge_secrets(strangers, probes)

    def _attempt(self, name: str, is_refused: bool, said: str) -> None:
        click.echo(f"{'refused' if is_refused else 'let in':8} {name}: {said.strip()[-300:]}")
        self.outcome.tried += 1
        self.outcome.refused += is_refused

    def _try_posing(self, strangers: Strangers) -> None:
        """Let servers with certificates of other roles pose as the coordinator."""
        for name in POSE_PORTS:
            said, calls = strangers.pose(name)
            self._attempt(
                f"poses as the coordinator: {name}",
                "not a coordinator's" in said and not calls,
                f"{said} {calls or ''}",
            )

    def _try_lure(self, strangers: Strangers) -> None:
        """Let a worker give a false address, and a submitter ask it."""
        said, calls = strangers.lure()
        gained = helps(calls, self._tokens())
        refused = bool(calls) and not gained and "has not proven" in said
        self._attempt("a worker with a false address", refused, f"{said} {len(calls)} calls came {gained or ''}")

    def _try_squatting(self) -> None:
        """Let another user take a coordinator's port."""
        loopback = Loopback(self._deployment)
        gained = loopback.squat()
        self._secrets.append(loopback.token())
        self._attempt("another user on the coordinator's port", not gained, gained)

    def _tokens(self) -> list[str]:
        """Return the tokens of people and workers, and the bootstrap token."""
        found = self._deployment.coordinator.run("sh", "-c", f"cat *.token {DIRECTORY}/token").stdout
        return found.split()

    def _try_cache(self) -> None:
        """Have a worker's host use a cache that another of its users made."""
        host = self._deployment.hosts["reward"]
        host.run("sh", "-c", MAKE_CACHE)
        command = f"PACELINE_BUNDLE_CACHE=/tmp/theirs python -c '{OPEN_CACHE}'"
        done = host.run("sh", "-c", command, check=False)
        self._attempt("another user's cache", "user 65534 owns /tmp/theirs" in done.stderr, done.stderr)

    def _judge_secrets(self, strangers: Strangers, probes: Sequence[dict[str, Any]]) -> None:
        """Search every log, every refusal and the coordinator's directory for tokens and keys."""
        host = self._deployment.coordinator
        secrets = [*strangers.secrets(), *self._tokens(), *self._secrets]
        key = host.run("cat", "/tmp/tls/tls.key").stdout.splitlines()[1:-1]
        secrets += [line for line in key if len(line) > 40]
        said = {path.name: path.read_text(errors="replace") for path in self._deployment.logs.glob("*.log")}
        said["refusals"] = "".join(probe["said"] for probe in probes)
        for name, text in said.items():
            if any(secret[:40] in text for secret in secrets):
                self._problem(f"{name} has a secret")
        host.write("/tmp/secrets", "\n".join(secrets) + "\n")
        found = host.run("grep", "-rlaF", "-f", "/tmp/secrets", DIRECTORY, check=False).stdout.split()
        for path in set(found) - {f"{DIRECTORY}/token"}:
            self._problem(f"{path} has a secret")

    def _judge_probes(self, probes: Sequence[dict[str, Any]]) -> None:
        logs = {path.stem: path.read_text() for path in self._deployment.logs.glob("*.log")}
        for probe in probes:
            name, said = probe["name"], probe["said"]
            click.echo(f"{'refused' if probe['refused'] else 'let in':8} {name} ({probe['seconds']} s): {said}")
            if name.startswith("control"):
                if probe["refused"] or said:
                    self._problem(f"{name}: {said}")
                continue
            self.outcome.tried += 1
            self.outcome.refused += probe["refused"]
            for start, log, text in LOGGED:
                if name.startswith(start):
                    if not any(text in content for stem, content in logs.items() if stem.startswith(log)):
                        self._problem(f"{name}: no {log} log has {text!r}")
                    break

    def _judge_run(self, run_id: str, ended: dict[str, Any]) -> None:
        click.echo(f"the run has {ended['step']} steps")
        if ended["state"] != "succeeded":
            self._problem(f"the run is {ended['state']} at step {ended['step']}: {ended.get('message')}")
        host = self._deployment.coordinator
        done = host.run("python", "-c", JUDGE, f"{DIRECTORY}/ledger.sqlite", run_id, timeout_s=DEADLINE_S)
        for problem in json.loads(done.stdout.splitlines()[-1]):
            self._problem(problem)
        audit = host.run("sh", "-c", f"paceline ledger verify {run_id} --directory {DIRECTORY}", check=False)
        if audit.returncode:
            self._problem(f"the books: {audit.stdout}{audit.stderr}")

    def _judge_audit(self, probes: Sequence[dict[str, Any]]) -> None:
        """Compare the audit log with the refused calls. A record may stand for several refusals."""
        host = self._deployment.coordinator
        shown = host.run("paceline", "audit", "show", "--all", "--json", "--directory", DIRECTORY)
        records = [json.loads(line) for line in shown.stdout.splitlines()]
        refusals = [record for record in records if record["result"] != "OK"]
        by_call = sum(probe["said"].startswith(AUDITED) for probe in probes)
        recorded = sum(record.get("count", 1) for record in refusals)
        click.echo(f"{recorded} refusals are in the audit log, {by_call} calls were refused")
        if recorded < by_call:
            self._problem(f"the audit log has {recorded} refusals, {by_call} calls were refused")
        for call in CALLS - {record["what"] for record in refusals}:
            self._problem(f"the audit log has no refusal of {call}")
        verified = host.run("paceline", "audit", "verify", "--directory", DIRECTORY, check=False)
        if verified.returncode:
            self._problem(f"the audit log: {verified.stdout}{verified.stderr}")

    def _problem(self, text: str) -> None:
        self.outcome.problems.append(text)


JUDGE = """
import json, pathlib, sys
from paceline.services.coordinator.ledger.ledger import Ledger

ledger, run_id, problems = Ledger(pathlib.Path(sys.argv[1]), read_only=True), sys.argv[2], []
counted = dict(
    again="SELECT COUNT(*) FROM groups WHERE attempt > 1 AND run_id = ?",
    sessions="SELECT COUNT(DISTINCT session) - 1 FROM receipts WHERE run_id = ?",
)
for name, query in counted.items():
    if number := ledger.db.execute(query, (run_id,)).fetchone()[0]:
        problems.append(f"{name}: {number}")
print(json.dumps(problems))
"""
"""Prints what was disturbed: groups that were given out again, and sessions of the learner beyond the first."""


def run_campaign(minutes: float, logs: Path) -> Outcome:
    """Run all of it."""
    with Switch() as switch:
        deployment = SecureDeployment(switch, logs)
        deployment.start()
        campaign = Campaign(deployment, minutes)
        campaign.run()
        for host in (*deployment.hosts.values(), deployment.client):
            host.stop()
        return campaign.outcome


@click.command()
@click.option("--minutes", default=2.5, show_default=True, help="Time for which the run trains.")
@keep_option
def main(minutes: float, keep: Path | None) -> None:
    """Run the campaign and print the verdict."""
    run_and_judge("strangers", lambda logs: run_campaign(minutes, logs), keep)


if __name__ == "__main__":
    main()
