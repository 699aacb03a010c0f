"""One rank of a replay: it trains recorded batches again, without services. Batches come from the ledger, weights from
a checkpoint or the model, and results go to a folder. The trainer takes the same steps as in
`services/learner/training/run.py`, so on CPUs, at the recorded world size and thread count, it reaches the run's
weights bit for bit. Rank 0 prints one JSON object on a line for each step, and one for the checkpoint of the last
step."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import click
import torch
import torch.distributed as dist

from paceline.data.tokens import load_tokenizer
from paceline.errors import PacelineError
from paceline.files.names import BLOBS_NAME
from paceline.host.onednn import bound_caches
from paceline.host.process import end_process
from paceline.host.resources import return_large_tensors
from paceline.learner.batch.samples import TrainingSample, sequences_from_groups
from paceline.learner.checkpoints import checkpoint as checkpoints
from paceline.learner.objectives.examples import ExampleSource
from paceline.learner.step.trainer import Trainer
from paceline.services.common.processes.starting import die_with_starter
from paceline.services.coordinator.blobs import BlobStore
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.services.coordinator.lifecycle.run_data import RunBundles
from paceline.services.learner.rank_group import set_up_device
from paceline.services.replay.plan import plan_replay, read_part
from paceline.spec import RunSpec
from paceline.spec.reading import spec_from_yaml

log = logging.getLogger(__name__)


def replay(
    ledger: Ledger, run_id: str, spec: RunSpec, start: int, end: int, output: Path, device: torch.device
) -> None:
    """Train steps [start, end) of the run with the settings of `spec`, and write `output/checkpoints/0-<end>`. A
    collective call of all ranks. Raises NotFound, Conflict and the trainer's errors."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    plan = plan_replay(ledger, run_id, start, end)
    torch.manual_seed(spec.seed)
    trainer = Trainer(spec, device)
    if plan.checkpoint is not None:
        checkpoints.load(
            plan.checkpoint.path,
            expected_sha256=plan.checkpoint.sha256,
            model=trainer.model,
            optimizer=trainer.optimizer,
            critic=trainer.critic,
            reference=trainer.synced_reference,
        )
    examples: ExampleSource | None = None
    if not spec.samples:
        bundles = RunBundles(ledger, BlobStore(ledger.path.parent / BLOBS_NAME))
        with bundles.opened(spec, ledger.bundle(run_id), "data") as local:
            examples = ExampleSource(local, load_tokenizer(spec.policy), trainer.objective)
        trainer.reference.prepare(examples, rank)

    def part(step: int) -> list[TrainingSample]:
        if examples is not None:
            return examples.of_step(step, rank, world_size)
        return sequences_from_groups(read_part(ledger, plan, step, rank, world_size), spec)

    for step in range(start, end):
        metrics = trainer.train_step(part(step), step)
        if rank == 0:
            print(json.dumps({"step": step, **metrics}), flush=True)
    saved = checkpoints.save(
        output / "checkpoints",
        session=0,
        step=end,
        model=trainer.model,
        optimizer=trainer.optimizer,
        critic=trainer.critic,
        reference=trainer.synced_reference,
    )
    if saved is not None:
        print(json.dumps({"checkpoint": str(saved.path), "sha256": saved.manifest_sha256}), flush=True)


@click.command()
@click.option("--ledger", "ledger_path", type=click.Path(path_type=Path), required=True)
@click.option("--run-id", required=True)
@click.option("--spec", "spec_path", type=click.Path(path_type=Path), required=True)
@click.option("--from", "start", type=int, required=True)
@click.option("--to", "end", type=int, required=True)
@click.option("--output", type=click.Path(path_type=Path), required=True)
@click.option("--device", required=True)
def main(ledger_path: Path, run_id: str, spec_path: Path, start: int, end: int, output: Path, device: str) -> None:
    """Run one rank of a replay; `paceline replay` sets the options."""
    die_with_starter()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    bound_caches()
    return_large_tensors()
    status = 0
    try:
        ledger = Ledger(ledger_path, read_only=True)
        spec = spec_from_yaml(spec_path.read_text())  # a coordinator has accepted it
        replay(ledger, run_id, spec, start, end, output, set_up_device(device, "127.0.0.1"))
    except PacelineError as error:
        log.error("%s", error)
        status = 1
    except Exception:
        log.exception("the replay cannot continue")
        status = 1
    end_process(status)


if __name__ == "__main__":
    main()
