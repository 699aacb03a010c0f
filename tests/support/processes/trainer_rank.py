"""One rank of the two-rank tests: runs every case on its part of the batch and leaves the results as files."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checked_run import checked_steps
from loaded_models import differing, save_model
from safetensors.torch import load_file, save_file
from tiny_policy import CASES, CPU, batch_of, make_batch, make_spec, rank_part, run_case
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from paceline.errors import Conflict, InvalidInput, NonFiniteLoss, Unreadable
from paceline.host.process import end_process
from paceline.learner.checkpoints.export import export_live
from paceline.learner.collectives import FailedElsewhere, succeed_on_all_ranks
from paceline.learner.model.adapter import adapter_weights
from paceline.learner.model.policy import load_policy, load_reference
from paceline.learner.objectives import objective_of
from paceline.learner.objectives.examples import ExampleSource, check_rows
from paceline.learner.step.trainer import Trainer
from paceline.learner.weights.gather import gather_merged
from paceline.services.demo.task import make_tokenizer
from paceline.spec import PolicySection
from paceline.weights.format.lora_names import FINGERPRINT, fingerprint


def main(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    for name, case in CASES.items():
        own = rank_part(batch_of(name), rank)  # rank 1 has less, so it fills up with dummy passes
        metrics, tensors = run_case(model, case, own, budget=12)
        (out / f"{name}.{rank}.json").write_text(json.dumps(metrics))
        save_file(tensors, out / f"{name}.{rank}.safetensors")
    for name, case in (("dapo", CASES["dapo"]), ("ppo", CASES["ppo"] | {"num_updates_per_step": 1})):
        (out / f"non_finite_{name}.{rank}.json").write_text(json.dumps(non_finite(model, rank, case)))
    (out / f"too_long.{rank}.txt").write_text(too_long(out))
    (out / f"loading.{rank}.json").write_text(json.dumps(loading(out)))
    compared, _, _ = checked_steps(model, 5, max_age=2, rank=rank, ranks=2)
    (out / f"compared.{rank}.json").write_text(json.dumps([[each._asdict() for each in step] for step in compared]))
    (out / f"elsewhere.{rank}.json").write_text(json.dumps(lacks_its_model(model, out, rank)))
    end_process()


def lacks_its_model(model: Path, out: Path, rank: int) -> list[str]:
    """Rank 1 has no model at first: neither rank may wait for the other in a collective, and both can retry."""
    said = []
    for folder in (model if rank == 0 else out / "not_mounted", model):
        try:
            succeed_on_all_ranks(lambda folder=folder: Trainer(make_spec(folder), CPU), CPU)  # type: ignore[misc]
        except (Unreadable, FailedElsewhere) as error:
            said.append(type(error).__name__)
        else:
            said.append("set up")
    return said


def loading(out: Path) -> dict[str, list[str]]:
    """Return what differs from transformers' own loading, in this rank's rows; rows are not divisible by ranks."""
    found = {}
    for kind in ("tied", "moe", "scaled"):
        folder = save_model(kind, out / kind)  # transformers writes on rank 0 alone
        dist.barrier()
        policy = make_spec(folder, precision="bfloat16").policy
        found[kind] = differing(load_policy(policy, CPU), folder, torch.float32)
        export = out / f"{kind} export"
        exported = load_policy(policy, CPU)
        assert export_live(export, exported, policy, dtype=torch.bfloat16, piece_bytes=500) is None
        dist.barrier()
        found[f"{kind}, exported"] = differing(exported, export, torch.float32)
        found[f"{kind}, frozen"] = differing(load_reference(policy, CPU), folder, torch.bfloat16)
    adapted = make_spec(out / "tied", precision="bfloat16", lora_cfg={"enabled": True}).policy
    model = load_policy(adapted, CPU)
    found["adapted"] = differing(model, out / "tied", torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.fill_(0.01)
    assert export_live(out / "merged", model, adapted, dtype=torch.float32) is None
    merged = {name: tensor for name, tensor in gather_merged(model).items() if name != "lm_head.weight"}
    if dist.get_rank() == 0:
        torch.testing.assert_close(load_file(out / "merged" / "model.safetensors"), merged, check_dtype=False)
    found["failed"] = failed_export(out, model, adapted)
    plain = AutoModelForCausalLM.from_pretrained(out / "tied")
    same = torch.equal(adapter_weights(model)[FINGERPRINT], fingerprint(plain.state_dict()))
    found["fingerprint"] = [] if same else ["differs"]
    return found


def failed_export(out: Path, model: torch.nn.Module, policy: PolicySection) -> list[str]:
    """Rank 0 cannot write: only it gets the error, and the ranks are at one point afterwards."""
    (out / "other").mkdir(exist_ok=True)  # no export, so it is never replaced
    failure = export_live(out / "other", model, policy, dtype=torch.float32)
    dist.barrier()
    return [] if isinstance(failure, Conflict if dist.get_rank() == 0 else type(None)) else [repr(failure)]


def too_long(out: Path) -> str:
    """Row 3, which rank 1 checks, does not fit: every rank has to say so, and none may wait for the other."""
    rows = out / f"rows.{dist.get_rank()}.jsonl"
    lengths = (1, 4, 2, 30, 3)
    rows.write_text("".join(json.dumps({"prompt": "1+1=", "completion": "7" * n}) + "\n" for n in lengths))
    spec = make_spec(out, "sft", max_total_sequence_length=20)
    data = spec.data.model_copy(update={"train": str(rows)})
    source = ExampleSource(spec.model_copy(update={"data": data}), make_tokenizer(), objective_of(spec))
    try:
        check_rows(source, CPU, dist.get_rank())
    except InvalidInput as error:
        return str(error)
    return ""


def non_finite(model: Path, rank: int, case: dict[str, Any]) -> dict[str, object]:
    """Only rank 1 has a NaN; both must say so before any weight moved, and both must be able to continue."""
    torch.manual_seed(0)
    trainer = Trainer(make_spec(model, train_mb_tokens=12, **case), CPU)
    models = [trainer.model, *([] if trainer.critic is None else [trainer.critic.model])]
    before = [local(p).clone() for m in models for p in m.parameters()]
    batch = make_batch()
    own = rank_part(batch, rank)
    broken = list(own)
    if rank == 1:
        broken[0].behaviour_logprobs_T[0] = float("nan")
    try:
        trainer.train_step(broken, 0)
    except NonFiniteLoss as error:
        group_ids = error.group_ids
    else:
        group_ids = ()
    after = [local(p) for m in models for p in m.parameters()]
    untouched = all(torch.equal(a, b) for a, b in zip(before, after, strict=True)) and not trainer.optimizer.state
    if rank == 1:
        broken[0].behaviour_logprobs_T[0] = -3.0
    loss_after = trainer.train_step(own, 0)["loss"]
    return {"group_ids": group_ids, "untouched": untouched, "loss_after": loss_after}


def local(parameter: torch.Tensor) -> torch.Tensor:
    parameter = parameter.detach()
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
