"""A run whose rollout workers join and leave: real services, and the checks of the tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.calls.token import metadata, open_channel, read_token, token_path
from paceline.client import Client
from paceline.files.storage import Folder
from paceline.groups import Version
from paceline.learner.checkpoints.checkpoint import load
from paceline.learner.checkpoints.manifest import read_manifest
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.demo.task import answer, make_model, problem
from paceline.services.local.cluster import LocalCluster
from paceline.spec import ClusterSection, RunSpec
from paceline.spec.reading import parse_spec
from paceline.v1 import learner_pb2, learner_pb2_grpc
from paceline.v1.common_pb2 import Role
from paceline.weights.hosts.local_socket import LABEL_VARIABLE

HERE = Path(__file__).parent
DEADLINE_S = 600.0
"""Deadline for anything that must happen; a longer wait counts as a hang."""
PROMPT = "07+45="
PROMPTS, STEP_S = 8, 0.4
"""Groups of a step, and seconds that their rewards take, one after the other."""
LOGPROB_TOLERANCE = 2e-4
"""In nats, between the native engine's batched float32 forward pass and transformers'."""


class Hang(AssertionError):
    """An expected event did not happen."""


def until(what: str, found: Callable[[], Any], deadline_s: float = DEADLINE_S, pause_s: float = 0.05) -> Any:
    """Poll until `found` returns something true, and return that. Raises Hang."""
    pause, end_s = threading.Event(), time.monotonic() + deadline_s
    while not (value := found()):
        if time.monotonic() > end_s:
            raise Hang(f"not within {deadline_s:.0f} s: {what}")
        pause.wait(pause_s)
    return value


class Worker:
    """A rollout service; a faulty one harms itself on orders. `prefix` is a program that becomes it. It is on a
    separate host, or on the learner's."""

    def __init__(
        self,
        name: str,
        address: str,
        log: Path,
        faulty: bool = False,
        prefix: Sequence[str] = (),
        beside_learner: bool = False,
    ):
        self.name = name
        self._orders, self._report = log.with_suffix(".orders"), log.with_suffix(".report")
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path[:1] + [p for p in sys.path[1:] if p]),
            "PACELINE_STARTER": str(os.getpid()),
            "PACELINE_FAULT": str(self._orders),
        }
        if not beside_learner:
            environment[LABEL_VARIABLE] = name
        program = [str(HERE / "faulty_rollout.py")] if faulty else ["-m", "paceline.services.rollout.main"]
        self.started_s = time.time()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, *program, "--coordinator", address, "--port", "0", "--name", name],
                env=environment,
                stdout=output,
                stderr=output,
            )

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        self.process.send_signal(number)

    def arm(self, phase: str, signal_name: str) -> None:
        """Order it to harm itself in that phase of its next transfer."""
        orders = {"phase": phase, "signal": signal_name, "report": str(self._report)}
        self._orders.write_text(json.dumps(orders))
        self.send(signal.SIGUSR1)

    def arm_relay(self, phase: str, signal_name: str, target: str) -> None:
        """Order its host's relay to harm itself in that phase of its next version, and this worker if `target` is
        `host`."""
        relay_orders = self._orders.with_suffix(".relay-orders")
        orders = {"phase": phase, "signal": signal_name, "report": str(self._report), "target": target}
        relay_orders.write_text(json.dumps(orders))
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.relay_pid(), signal.SIGUSR1)

    def relay_pid(self) -> int:
        """Process id of its host's newest relay."""
        return int(self._orders.with_suffix(".relay-pid").read_text())

    def struck_at_s(self) -> float:
        """Wall-clock time of the fault; 0 before."""
        if not self._report.exists() or not (lines := self._report.read_text().splitlines()):
            return 0.0
        return float(json.loads(lines[-1])["time"])

    def end(self) -> None:
        """Kill it, whatever its state."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(DEADLINE_S)


class Reference:
    """Return the state that transformers loads from a Hugging Face folder."""

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._prompt: list[int] = tokenizer(PROMPT, add_special_tokens=False).input_ids

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[T, V] of the distributions from which `tokens` came, after `PROMPT`."""
        found: torch.Tensor = self._model(torch.tensor([[*self._prompt, *tokens]])).logits
        return found[0, len(self._prompt) - 1 : -1]


@dataclass(frozen=True)
class Sampled:
    """A worker's answer to `PROMPT`."""

    version: Version
    greedy: list[int]
    random: list[int]
    logprobs: list[float]
    """Log-probabilities of the tokens of `random`."""

    def difference(self, reference: Reference) -> str:
        """Describe the difference from the expected answer under these weights; empty if there is none."""
        best = reference.logits(self.greedy).argmax(-1).tolist()
        if best != self.greedy:
            return f"greedy tokens {self.greedy}, should be {best}"
        logprobs = reference.logits(self.random).log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(self.random)[:, None])[:, 0]
        off = float((expected - torch.tensor(self.logprobs)).abs().max())
        return f"log-probabilities are off by {off:.2e}" if off > LOGPROB_TOLERANCE else ""


class ElasticRun:
    """A coordinator, a reward worker, a learner of some ranks, and rollout workers that the test starts."""

    def __init__(
        self,
        directory: Path,
        *,
        ranks: int,
        steps: int,
        max_wait_s: float = 10.0,
        step_s: float = STEP_S,
    ):
        self.directory = directory
        self.workers: dict[str, Worker] = {}
        self.cluster = LocalCluster(directory / "runs", ClusterSection(learner_ranks=ranks), say=lambda _: None)
        self._number = 0
        self._metrics: list[dict[str, Any]] = []
        self._metrics_read = 0
        self._spec = make_spec(directory, steps, max_wait_s, step_s)

    def __enter__(self) -> ElasticRun:
        try:
            self.address = self.cluster.start_coordinator()
            self.cluster.add("reward")
            self.cluster.add("learner")
            self.client = Client(self.address)
            self.run_id = self.client.submit(self._spec).run_id
        except BaseException:
            self.cluster.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers.values():
            worker.end()
        self.client.close()
        self.cluster.stop()

    def start_worker(self, faulty: bool = False, prefix: Sequence[str] = (), beside_learner: bool = False) -> Worker:
        """Start one more rollout worker."""
        name = f"elastic-{self._number}"
        self._number += 1
        log = self.directory / "runs" / "logs" / f"{name}.log"
        self.workers[name] = Worker(name, self.address, log, faulty, prefix, beside_learner)
        return self.workers[name]

    def end_worker(self, worker: Worker) -> None:
        """Kill a worker and drop it."""
        worker.end()
        self.workers.pop(worker.name, None)

    def step(self) -> int:
        """Number of trained steps."""
        return int(self.client.get(self.run_id).step)

    def member(self, worker: Worker) -> Any:
        """The coordinator's entry for a worker; None if there is none."""
        found = [m for m in self.client.members() if m.member_id.startswith(f"{worker.name}-")]
        return found[0] if found else None

    def version(self, worker: Worker) -> Version | None:
        """Return the version that a worker acknowledged last."""
        member = self.member(worker)
        if member is None or not member.HasField("version"):
            return None
        return Version(member.version.session, member.version.step)

    def member_events(self, worker: Worker) -> list[str]:
        """Return the run's events about a worker."""
        with contextlib.closing(Ledger(self.cluster.directory / "ledger.sqlite", read_only=True)) as ledger:
            events = [json.loads(e["json"]) for e in ledger.events(self.run_id, 0) if e["kind"] == "member"]
        return [event["what"] for event in events if event["member_id"].startswith(f"{worker.name}-")]

    def metrics(self, kind: str) -> list[dict[str, Any]]:
        """Lines of metrics.jsonl."""
        path = self.cluster.directory / self.run_id / "metrics.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._metrics_read)
                for line in file:
                    if line.endswith(b"\n"):  # else it is being written
                        self._metrics_read += len(line)
                        self._metrics.append(json.loads(line))
        return [line for line in self._metrics if line["kind"] == kind]

    def step_begun_after(self, time_s: float) -> float:
        """Start of the first recorded step that began after the wall-clock instant `time_s`; 0 if there is none yet."""
        for line in self.metrics("train"):
            begun_s = float(line["time"] - line["step_s"] - line.get("publish_wait_s", 0.0))
            if begun_s > time_s:
                return begun_s
        return 0.0

    def learner_ranks(self) -> list[int]:
        """Process ids of the learner's ranks, in no order."""
        service = self.cluster.pids("learner").get(0)
        if service is None:
            return []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(service).children(recursive=True)
            return [c.pid for c in children if "paceline.services.learner.rank" in " ".join(c.cmdline())]
        return []

    def hold(self) -> Version:
        """Pause the run and return the learner's version."""
        self.client.pause(self.run_id)
        seen: list[tuple[Version, float]] = []

        def settled() -> Version | None:
            status = self._learner("Status", learner_pb2.LearnerServiceStatusRequest())
            if status is None or status.phase != "waiting":
                return None
            version = Version(status.version.session, status.version.step)
            if not seen or seen[-1][0] != version:
                seen.append((version, time.monotonic()))
            # The batch of one more step may have been sent before the pause.
            return version if time.monotonic() - seen[-1][1] > 1.0 else None

        version: Version = until("the learner waits", settled)
        return version

    def exported(self) -> Reference:
        """The learner's present weights."""
        order = learner_pb2.ExportRequest(name="now")
        return Reference(Path(until("an export", lambda: self._learner("Export", order)).path))

    def sampled(self, worker: Worker) -> Sampled:
        """A greedy and a random sample, each entirely under one version: the one that the worker reports."""
        member = self.member(worker)

        def both() -> Sampled | None:
            greedy, random = (
                self.client.generate(PROMPT, temperature=temperature, max_new_tokens=12, seed=5, worker=member.address)
                for temperature in (1e-4, 1.0)
            )
            versions = {
                Version(span.version.session, span.version.step) for (said,) in (greedy, random) for span in said.spans
            }
            if len(versions) != 1:
                return None  # an update came in between
            return Sampled(
                versions.pop(),
                list(greedy[0].token_ids),
                list(random[0].token_ids),
                list(random[0].logprobs),
            )

        found: Sampled = until(f"{worker.name} samples under one version", both)
        return found

    def wrong_weights(self, worker: Worker, reference: Reference, version: Version) -> str:
        """Describe how a worker's tokens and log-probabilities differ from those of `version`; empty if they do not."""
        sampled = self.sampled(worker)
        if sampled.version != version:
            return f"{worker.name} samples under {tuple(sampled.version)}, the learner is at {tuple(version)}"
        difference = sampled.difference(reference)
        return f"{worker.name}: {difference}" if difference else ""

    def replayed(self, step: int) -> Reference:
        """The weights after `step` steps, trained again from the recorded run by `paceline replay`."""
        output = self.directory / f"replay-{step}-{time.monotonic_ns()}"
        with contextlib.closing(Ledger(self.cluster.directory / "ledger.sqlite", read_only=True)) as ledger:
            rows = ledger.db.execute(
                "SELECT step FROM checkpoints WHERE run_id = ? AND removed = 0 AND step < ?",
                (self.run_id, step),
            )
            start = max((row["step"] for row in rows), default=0)
        arguments = ["replay", str(self.cluster.directory / self.run_id), "--output", str(output), "--json"]
        arguments += ["--from", str(start), "--to", str(step), "--device", "cpu"]
        done = subprocess.run(
            [sys.executable, "-c", "from paceline.services.cli.main import main; main()", *arguments],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=True,
        )
        facts = json.loads(done.stdout)
        model = AutoModelForCausalLM.from_pretrained(self._spec.policy.model_name, dtype=torch.float32)
        path = facts["checkpoint"]
        load(path, expected_sha256=read_manifest(Folder(path))[1], model=model)
        model.save_pretrained(output / "model")
        AutoTokenizer.from_pretrained(self._spec.policy.model_name).save_pretrained(output / "model")
        return Reference(output / "model")

    @contextlib.contextmanager
    def learner_status(self) -> Iterator[Callable[[], Any]]:
        """Return a function that asks the learner for its status, without the coordinator."""
        (address,) = {m.address for m in self.client.members() if m.role == Role.Value("ROLE_LEARNER") and m.address}
        with open_channel(address, known=lambda: metadata(read_token(token_path()))) as channel:
            stub = learner_pb2_grpc.LearnerServiceStub(channel)
            yield lambda: stub.Status(learner_pb2.LearnerServiceStatusRequest(), timeout=60.0)

    def _learner(self, method: str, request: Any) -> Any:
        """The learner's answer; None when there is none now."""
        for member in self.client.members():
            if member.role == Role.Value("ROLE_LEARNER") and member.address:
                with (
                    open_channel(member.address, known=lambda: metadata(read_token(token_path()))) as channel,
                    contextlib.suppress(grpc.RpcError),
                ):
                    return getattr(learner_pb2_grpc.LearnerServiceStub(channel), method)(request, timeout=60.0)
        return None


def make_spec(directory: Path, steps: int, max_wait_s: float, step_s: float) -> RunSpec:
    """A model of some megabytes, so that a version is several buckets, on the task of the demo.

    The reward takes its time, so that a step takes a little more than `step_s` whatever the processor, and leaves some
    of it to the workers that start.
    """
    directory.mkdir(parents=True, exist_ok=True)
    make_model(directory / "model", seed=0, hidden=128, layers=4, heads=4)
    rows = [{"prompt": problem(a, b), "answer": answer(a, b)} for a in range(40) for b in range(0, 40, 3)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = directory / "rewards.py"
    reward.write_text(
        "import time\n\n\n"
        "def digits(completions, **columns):\n"
        f"    time.sleep({step_s / PROMPTS})\n"
        "    return [sum(map(str.isdigit, c)) for c in completions]\n"
    )
    return parse_spec(
        {
            "name": "elastic",
            "policy": {
                "model_name": str(directory / "model"),
                "max_total_sequence_length": 40,
                "optimizer": {"lr": 1e-3},
                "generation": {"max_new_tokens": 12, "max_batch_size": 16},
            },
            "data": {"train": str(directory / "train.jsonl")},
            "grpo": {
                "num_prompts_per_step": PROMPTS,
                "num_generations_per_prompt": 4,
                "max_num_steps": steps,
            },
            "async_grpo": {"max_trajectory_age_steps": 3, "late_wait_s": 2.0},
            "rewards": [{"function": f"{reward}:digits"}],
            "weights": {"max_wait_s": max_wait_s},
            # The test replays from one of them, and compares with exports.
            "checkpointing": {"save_period": 10, "keep_top_k": 20, "export_dtype": "float32"},
            "logger": {"tensorboard": False},
        }
    )
