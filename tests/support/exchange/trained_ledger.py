"""A ledger that the real exchange wrote: one run with one trained step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data.prompts import open_prompts
from paceline.groups import Completion, Group, Version, VersionSpan
from paceline.services.coordinator.exchange.replies import Outcome
from paceline.services.coordinator.exchange.requests.table import validate_upload
from paceline.services.coordinator.exchange.state import ActiveRun, Exchange
from paceline.services.coordinator.exchange.transport.dispatch import handle
from paceline.services.coordinator.exchange.uploads.intake import Arrived, store
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.members.registry import Introduction, Member
from paceline.spec import RunSpec
from paceline.spec.reading import spec_to_yaml
from paceline.v1 import common_pb2
from paceline.v1 import exchange_pb2 as pb
from paceline.wire import PROTOCOL, encode_result

RUN_ID = "sums-1"
PROMPT_IDS = np.array([4, 5], np.int32)
COMPLETION_LENGTHS = (2, 3)


class Writer:
    """A ledger with one run, and the exchange through which one step is generated, scored and trained."""

    def __init__(self, directory: Path, model_name: str, row: dict[str, Any] | None = None):
        row = row or {"prompt": "1+1=", "answer": "2"}
        (directory / "train.jsonl").write_text(json.dumps(row) + "\n")
        self.ledger = Ledger(directory / "runs" / "ledger.sqlite")
        self.spec = RunSpec.model_validate(
            {
                "name": "sums",
                "policy": {"model_name": model_name, "generation": {"max_new_tokens": 8}},
                "data": {"train": str(directory / "train.jsonl")},
                "rewards": [{"function": "exact_match"}, {"function": "length", "weight": 0.5}],
                "grpo": {"num_prompts_per_step": 1, "num_generations_per_prompt": 2, "max_num_steps": 2},
            }
        )
        folder = directory / "runs" / RUN_ID
        folder.mkdir()
        with self.ledger.transaction():
            self.ledger.add_run(RUN_ID, spec_to_yaml(self.spec), str(folder))
            self.ledger.update_run(RUN_ID, state="running", session=1)
        self.exchange = Exchange(self.ledger)
        self.exchange.active = ActiveRun(RUN_ID, self.spec, open_prompts(self.spec.data, 1), None)
        for role in ("rollout", "reward", "learner"):
            number = common_pb2.Role.Value(f"ROLE_{role.upper()}")
            self.exchange.senders.enter(Member(role, Introduction(number), 0.0, session=1 if role == "learner" else 0))
        self.exchange.workers.versions["rollout"] = Version(1, 1)

    def send(self, member_id: str, frames: list[bytes] | None = None, **body: Any) -> Outcome:
        """Send one request in its own transaction."""
        request = pb.ExchangeRequest(
            protocol=PROTOCOL, term=self.ledger.term, run_id=RUN_ID, member_id=member_id, session=1, **body
        )
        sender = self.exchange.senders.get(member_id)
        assert sender is not None
        request.secret = sender.stream.secret
        arrived = Arrived(request, frames or [])
        if frames:
            validate_upload(arrived)
            store(self.ledger.payloads, [arrived])
        with self.ledger.transaction():
            outcome = handle(self.exchange, arrived, 0.0)
        assert outcome.reply.status in (pb.REPLY_STATUS_OK, pb.REPLY_STATUS_COMMITTED), outcome.reply.message
        return outcome

    def train_a_step(self) -> None:
        """Train two completions of 2 and 3 tokens; the second begins under version 0 and ends under 1."""
        (lease,) = self.send("rollout", lease=pb.LeaseRequest(room=2)).reply.lease.leases
        completions = [
            completion(0, 2, "2", ((1, 0, 0, 2),)),
            completion(1, 3, "three", ((1, 0, 0, 1), (1, 1, 1, 3))),
        ]
        result = pb.GroupResult(
            group_id=lease.group_id,
            attempt=lease.attempt,
            digest=Group(lease.group_id, PROMPT_IDS, tuple(completions)).digest(),
        )
        self.send("rollout", encode_result(PROMPT_IDS, completions), group=result)
        (task,) = self.send("reward", task=pb.TaskRequest(room=1)).reply.task.tasks
        score = pb.ScoreResult(
            group_id=task.group_id,
            attempt=task.attempt,
            digest=task.digest,
            functions=["exact_match", "length"],
            rewards=[1.0, 0.5, 0.0, float("nan")],
        )
        self.send("reward", score=score)
        (group,) = self.send("learner", batch=pb.BatchRequest(step=0, rank=0, world_size=1)).reply.batch.groups
        receipt = pb.Receipt(step=0, rank=0, world_size=1, tokens=sum(COMPLETION_LENGTHS))
        receipt.groups.add(group_id=group.group_id, digest=group.digest, scores_digest=group.scores_digest)
        self.send("learner", receipt=receipt)


def completion(seed: int, length: int, text: str, spans: tuple[tuple[int, int, int, int], ...]) -> Completion:
    rng = np.random.default_rng(seed)
    tokens_T = rng.integers(0, 50, length).astype(np.int32)
    return Completion(
        tokens_T,
        -rng.random(length).astype(np.float32),
        tuple(VersionSpan(*span) for span in spans),
        "stop",
        text,
    )
